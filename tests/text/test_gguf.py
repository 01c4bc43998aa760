"""Tokenizers from GGUF metadata against independent implementations."""

from __future__ import annotations

import json
import logging
import random
import unicodedata
from typing import Any

import pytest
import sentencepiece

from penstock.errors import InvalidModel
from penstock.text.tokenizers.pre_tokenizers import SPLITTINGS
from penstock.text.tokenizers.tokenizer import Tokenizer

K = "tokenizer.ggml."
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%(end)s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%(end)s"
    r"|%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# the published patterns, each applied to what the one before left apart
PATTERNS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "llama-bpe": [WORDS % r"\p{N}{1,3}"],
    "dbrx": [WORDS % r"\p{N}{1,3}"],
    "qwen2": [WORDS % r"\p{N}"],
    "tekken": [CASED % {"end": "", "digits": r"\p{N}"}],
    "gpt-4o": [CASED % {"end": "(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "digits": r"\p{N}{1,3}"}],
    "bloom": [r" ?[^(\s|.,!?…。，、।۔،)]+"],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
}


@pytest.fixture(scope="module")
def bpe(byte_level) -> dict:
    """GGUF metadata of the small byte-level vocabulary."""
    tokens = sorted(byte_level.get_vocab(), key=byte_level.get_vocab().get)
    special = {"<|endoftext|>": 3, "<|im_end|>": 3, "[TOOL]": 4}
    merges = json.loads(byte_level.to_str())["model"]["merges"]
    return {
        "general.architecture": "llama",
        K + "model": "gpt2",
        K + "pre": "gpt-2",
        K + "tokens": tokens,
        K + "token_type": [special.get(token, 1) for token in tokens],
        K + "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        K + "bos_token_id": 0,
        K + "eos_token_id": 0,
        K + "add_bos_token": False,
    }


def pieces_metadata(model: sentencepiece.SentencePieceProcessor, defined: list[str], **extra) -> dict:
    def kind(id: int) -> int:
        asked = [(model.is_unknown, 2), (model.is_control, 3), (model.is_byte, 6), (model.is_unused, 5)]
        return next((number for ask, number in asked if ask(id)), 4 if model.id_to_piece(id) in defined else 1)

    ids = range(model.vocab_size())
    return {
        K + "model": "llama",
        K + "tokens": [model.id_to_piece(id) for id in ids],
        K + "scores": [model.get_score(id) for id in ids],
        K + "token_type": [kind(id) for id in ids],
        K + "bos_token_id": 1,
        K + "eos_token_id": 2,
        K + "unknown_token_id": 0,
        **extra,
    }


@pytest.fixture(scope="module")
def pieces(train_sentencepiece) -> dict:
    model = sentencepiece.SentencePieceProcessor(model_proto=train_sentencepiece(add_dummy_prefix=True))
    return pieces_metadata(model, [])


@pytest.mark.parametrize("name", PATTERNS)
def test_byte_level_encodes_as_published(bpe, texts, name, naive_bytes):
    metadata, splitting = {**bpe, K + "pre": name}, SPLITTINGS[name]
    tokenizer, naive = Tokenizer.from_gguf(metadata), naive_bytes(metadata, PATTERNS[name], splitting.whole_words)
    for text in texts:
        if "<|" not in text:
            composed = unicodedata.normalize("NFC", text) if splitting.compose else text
            assert tokenizer.encode(text, add_special_tokens=False) == naive.encode(composed), text


@pytest.mark.parametrize("name", SPLITTINGS)
def test_every_splitting_keeps_the_text(bpe, texts, name):
    tokenizer = Tokenizer.from_gguf({**bpe, K + "pre": name})
    for text in texts[:60]:
        kept = unicodedata.normalize("NFC", text) if SPLITTINGS[name].compose else text
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == kept


def test_falcon_splits_punctuation_and_threes_of_digits(bpe):
    falcon = Tokenizer.from_gguf({**bpe, K + "pre": "falcon", K + "merges": []})
    split = falcon._backend.pre_tokenizer.pre_tokenize_str("a!? b1234567 c")
    assert [word for word, _ in split] == ["a", "!?", "Ġb", "123", "456", "7", "Ġc"]


@pytest.mark.parametrize(
    "options",
    [
        {"add_dummy_prefix": True},
        {"add_dummy_prefix": False},
        {"add_dummy_prefix": False, "user_defined_symbols": ["[TOOL]", "▁▁", "▁▁▁", "\n\n"]},
        {"add_dummy_prefix": True, "split_by_whitespace": False, "vocab_size": 700},
    ],
)
def test_sentencepiece_encodes_as_sentencepiece_does(train_sentencepiece, texts, options):
    model = sentencepiece.SentencePieceProcessor(model_proto=train_sentencepiece(**options))
    metadata = pieces_metadata(
        model, options.get("user_defined_symbols", []), **{K + "add_space_prefix": options["add_dummy_prefix"]}
    )
    tokenizer = Tokenizer.from_gguf(metadata)
    for text in texts:
        # control tokens in the text are ours to recognise, and only we tell a space from the sign pieces write it by
        if text and "<s>" not in text and not ("▁" in text and "user_defined_symbols" in options):
            assert tokenizer.encode(text) == [1, *model.encode(text)], text


def test_pieces_of_equal_score_merge_from_the_left(pieces, naive_pieces):
    """As the runs of spaces in Llama's vocabulary, which all have the lowest score."""
    runs = ["▁" * size for size in range(2, 17)]
    tokens = [token for token in pieces[K + "tokens"] if token not in runs] + runs
    kept = {token: at for at, token in enumerate(pieces[K + "tokens"])}
    metadata = {
        **pieces,
        K + "tokens": tokens,
        K + "add_space_prefix": False,
        K + "scores": [-1e9 if token in runs else pieces[K + "scores"][kept[token]] for token in tokens],
        K + "token_type": [1 if token in runs else pieces[K + "token_type"][kept[token]] for token in tokens],
    }
    tokenizer, naive, rng = Tokenizer.from_gguf(metadata), naive_pieces(metadata), random.Random(2)
    for _ in range(300):
        text = "".join(rng.choice(["a", "the", "-", "\n", ""]) + " " * rng.randrange(50) for _ in range(3))
        assert tokenizer.encode(text, add_special_tokens=False) == naive.encode(text), text


def test_control_tokens_in_the_text_are_recognised(pieces):
    tokenizer = Tokenizer.from_gguf(pieces)
    ids = tokenizer.encode("the</s>the", add_special_tokens=False)
    word = tokenizer.encode("the", add_special_tokens=False)
    assert ids == [*word, 2, *word]  # each stretch begins with its own space, as in llama.cpp
    assert tokenizer.decode(ids) == "the the"
    assert tokenizer.special_ids == {0, 1, 2}


def test_without_scores_the_order_of_ids_stands(pieces):
    metadata = {key: value for key, value in pieces.items() if key != K + "scores"}
    text = "the cat sat on the mat"
    assert Tokenizer.from_gguf(metadata).encode(text) == Tokenizer.from_gguf(pieces).encode(text)


@pytest.mark.parametrize(
    "add_bos, add_eos, expected",
    [(True, True, [1, "x", 2]), (False, False, ["x"]), (None, None, [1, "x"]), (False, True, ["x", 2])],
)
def test_what_stands_around_a_prompt(pieces, add_bos, add_eos, expected):
    flags = {K + "add_bos_token": add_bos, K + "add_eos_token": add_eos}
    tokenizer = Tokenizer.from_gguf({**pieces, **{key: flag for key, flag in flags.items() if flag is not None}})
    (word,) = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a") == [word if id == "x" else id for id in expected]


@pytest.mark.parametrize("name, adds", [("llama-bpe", True), ("tekken", True), ("gpt-2", False), ("qwen2", False)])
def test_bos_where_the_file_does_not_say(bpe, name, adds):
    metadata = {key: value for key, value in bpe.items() if key != K + "add_bos_token"}
    assert (Tokenizer.from_gguf({**metadata, K + "pre": name}).encode("") == [0]) is adds


def test_what_ends_an_answer(bpe):
    assert Tokenizer.from_gguf(bpe).eos_token_ids == (0,)
    template = "{{ messages[0]['content'] }}<|im_end|>"
    assert Tokenizer.from_gguf({**bpe, "tokenizer.chat_template": template}).eos_token_ids == (0, 1)
    assert Tokenizer.from_gguf({**bpe, "tokenizer.chat_template": "{{ messages }}"}).eos_token_ids == (0,)
    assert Tokenizer.from_gguf({**bpe, K + "eot_token_id": 5, K + "eom_token_id": 1}).eos_token_ids == (0, 5, 1)
    plain = {**bpe, K + "token_type": [1] * len(bpe[K + "tokens"]), "tokenizer.chat_template": template}
    assert Tokenizer.from_gguf(plain).eos_token_ids == (0,)
    assert Tokenizer.from_gguf({**bpe, K + "eos_token_id": 10**6}).eos_token_ids == ()


def test_a_control_token_that_begins_a_turn_ends_nothing(bpe):
    tokens, kinds = [*bpe[K + "tokens"], "<|im_start|>"], [*bpe[K + "token_type"], 3]
    template = "<|im_start|>{{ messages[0]['content'] }}<|im_end|>"
    metadata = {**bpe, K + "tokens": tokens, K + "token_type": kinds, "tokenizer.chat_template": template}
    assert Tokenizer.from_gguf(metadata).eos_token_ids == (0, 1)


@pytest.mark.parametrize("name, whole", [("llama-bpe", True), ("tekken", True), ("dbrx", False), ("gpt-2", False)])
def test_a_word_that_no_merge_makes_is_found_whole_where_the_model_expects_it(bpe, name, whole):
    tokens, kinds = [*bpe[K + "tokens"], "zqxj"], [*bpe[K + "token_type"], 1]
    tokenizer = Tokenizer.from_gguf({**bpe, K + "tokens": tokens, K + "token_type": kinds, K + "pre": name})
    assert (tokenizer.encode("zqxj") == [len(tokens) - 1]) is whole


def test_tokens_of_the_same_text_and_rows_without_a_token(bpe):
    size = len(bpe[K + "tokens"])
    tokens = [*bpe[K + "tokens"], "a", f"[PAD{size + 1}]"]
    tokenizer = Tokenizer.from_gguf({**bpe, K + "tokens": tokens, K + "token_type": [*bpe[K + "token_type"], 1, 5]})
    (last,) = tokenizer.encode("a")
    assert last == size
    assert tokenizer.decode([tokens.index("a"), size, size + 1, size + 2]) == "aa"
    assert tokenizer.vocab_size == size + 2


def test_phi3_swallows_the_break_after_a_role(pieces):
    metadata = {
        **pieces,
        K + "tokens": [*pieces[K + "tokens"], "<|user|>"],
        K + "scores": [*pieces[K + "scores"], 0.0],
        K + "token_type": [*pieces[K + "token_type"], 4],
    }
    role = len(pieces[K + "tokens"])
    (word,) = Tokenizer.from_gguf(metadata).encode("a", add_special_tokens=False)
    assert Tokenizer.from_gguf(metadata).encode("<|user|>\na")[:2] == [1, role]
    assert len(Tokenizer.from_gguf(metadata).encode("<|user|>\na")) > 3
    assert Tokenizer.from_gguf({**metadata, "general.architecture": "phi3"}).encode("<|user|>\na") == [1, role, word]


def test_a_templates_name_is_no_template(bpe, caplog):
    """Rendered, it would be the whole prompt."""
    with caplog.at_level(logging.WARNING):
        named = Tokenizer.from_gguf({**bpe, "tokenizer.chat_template": "chatml"}, "model.gguf")
    assert named.chat_template is None
    assert "model.gguf: tokenizer.chat_template='chatml' is no Jinja template, and is left out" in caplog.text


def test_an_unnamed_splitting_goes_by_architecture(bpe, caplog, naive_bytes):
    old = {key: value for key, value in bpe.items() if key != K + "pre"}
    with caplog.at_level(logging.WARNING):
        falcon = Tokenizer.from_gguf({**old, "general.architecture": "falcon"})
    assert "using 'falcon'" in caplog.text
    assert falcon.encode("x!? 1234") == Tokenizer.from_gguf({**bpe, K + "pre": "falcon"}).encode("x!? 1234")
    plain = Tokenizer.from_gguf({**bpe, K + "pre": "default"})
    assert plain.encode("I'll x!? 12") == naive_bytes(bpe, [GPT2]).encode("I'll x!? 12")


@pytest.mark.parametrize(
    "change, words",
    [
        ({K + "model": None}, ["no tokenizer.ggml.model", "skip_tokenizer_init"]),
        ({K + "model": "plamo2"}, ["'plamo2'", "gpt2, llama, gemma4, bert, t5, rwkv"]),
        ({K + "model": 7}, ["must be a string"]),
        ({K + "pre": "klingon"}, ["'klingon'", "llama-bpe", "skip_tokenizer_init"]),
        ({K + "tokens": []}, ["tokens is missing or empty"]),
        ({K + "tokens": [1, 2]}, ["must hold only str"]),
        ({K + "token_type": [1, 1]}, ["2 entries for"]),
        ({K + "merges": ["ab"]}, ["'ab'", "not a pair"]),
        ({K + "add_bos_token": 1}, ["true or false"]),
        ({K + "bos_token_id": "x"}, ["a token id"]),
        ({"tokenizer.chat_template": 3}, ["a string"]),
    ],
)
def test_damaged_metadata_is_refused_by_name(bpe, change, words):
    with pytest.raises(InvalidModel) as refused:
        Tokenizer.from_gguf({**bpe, **change}, origin="model.gguf")
    for word in ["model.gguf", *words]:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


def test_bad_scores_and_endless_tokens_are_refused(pieces):
    size = len(pieces[K + "tokens"])
    for change in (
        {K + "scores": [float("nan")] * size},
        {K + "tokens": ["x" * 5000, *pieces[K + "tokens"][1:]], K + "token_type": [1] * size},
    ):
        with pytest.raises(InvalidModel, match="scores must be finite|5000 characters"):
            Tokenizer.from_gguf({**pieces, **change})


def test_whatever_the_metadata_says_only_our_error_comes(bpe, pieces):
    """400 files with values replaced and entries of lists altered: refused, or a tokenizer that works."""
    rng, num_refused = random.Random(5), 0
    junk: list[Any] = [None, True, -1, 3, 10**12, 0.5, float("nan"), "", "x", [], [1], ["a"], [0.5], [None], {}]
    other: dict[type, list[Any]] = {
        str: ["", "x", "a b", "▁", "<0x41>", "é" * 9],
        int: [-1, 0, 2, 3, 4, 5, 6, 99],
        float: [0.0, 9.0, -1e30],
    }
    for _ in range(400):
        metadata = dict(rng.choice([bpe, pieces]))
        for key in rng.sample(sorted(metadata), 2):
            values = metadata[key]
            if isinstance(values, list) and rng.random() < 0.8:
                metadata[key] = values = list(values)
                for at in rng.choices(range(len(values)), k=3):
                    values[at] = rng.choice(other[type(values[at])])
            else:
                metadata[key] = rng.choice(junk)
        try:
            tokenizer = Tokenizer.from_gguf(metadata)
            tokenizer.decode(tokenizer.encode("the cat 😀\n"))
        except InvalidModel:
            num_refused += 1
    assert 50 < num_refused < 350
