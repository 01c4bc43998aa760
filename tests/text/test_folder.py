"""Tokenizers from a model's folder, against transformers reading the same folder."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from penstock.errors import InvalidModel, InvalidRequest
from penstock.text.tokenizers.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture
def folder(byte_level, tmp_path) -> Path:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, name: str, **table) -> None:
    (folder / name).write_text(json.dumps(table))


def test_tokenizer_json_alone_suffices(folder, texts):
    tokenizer = Tokenizer.from_folder(folder)
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text), text
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip), text
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id, tokenizer.chat_template) == ((), None, None)
    assert tokenizer.vocab_size == len(oracle)
    assert load_tokenizer(folder).encode("the cat") == tokenizer.encode("the cat")


@pytest.mark.parametrize("template", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True},
    ],
)
def test_bos_and_eos_around_a_prompt(byte_level, tmp_path, template, config):
    backend = Backend.from_str(byte_level.to_str())
    if template:
        backend.post_processor = processors.TemplateProcessing(
            single="<|im_end|> $A", special_tokens=[("<|im_end|>", 1)]
        )
    backend.save(str(tmp_path / "tokenizer.json"))
    write(
        tmp_path,
        "tokenizer_config.json",
        bos_token="<|im_end|>",
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token={"__type": "AddedToken", "content": "<|endoftext|>"},
        **config,
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ("", "the cat", "<|im_end|>x"):
        for special in (True, False):
            assert tokenizer.encode(text, special) == oracle.encode(text, add_special_tokens=special)
    assert tokenizer.bos_token_id == 1


def test_tokens_named_only_in_the_settings(byte_level, tmp_path):
    """A plain vocabulary entry made special, one made matchable, and one that follows the last id."""
    vocab = json.loads(byte_level.to_str())["model"]
    backend = Backend(models.BPE(vocab=vocab["vocab"], merges=[tuple(merge) for merge in vocab["merges"]]))
    backend.pre_tokenizer, backend.decoder = byte_level.pre_tokenizer, byte_level.decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    size = backend.get_vocab_size()
    write(
        tmp_path,
        "tokenizer_config.json",
        eos_token="<|endoftext|>",
        tokenizer_class="PreTrainedTokenizerFast",
        added_tokens_decoder={
            "1": {"content": "<|im_end|>", "special": True, "normalized": False},
            str(size): {"content": "<new>", "special": False, "normalized": False},
            "99999": {"content": "<lost>", "special": False},
        },
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a<new><|im_end|><|endoftext|>")[1:] == [size, 1, 0]
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.eos_token_ids == (0,)
    assert tokenizer.decode(tokenizer.encode("<lost>")) == "<lost>" and 99999 not in tokenizer.encode("<lost>")


@pytest.mark.parametrize(
    "generation, config, named, expected",
    [
        ({"eos_token_id": [5, 0]}, {"eos_token_id": 7}, None, (5, 0)),
        ({"eos_token_id": 5}, {"eos_token_id": 7}, "<|im_end|>", (5, 1)),
        (None, {"eos_token_id": [7, 8]}, None, (7, 8)),
        (None, {"eos_token_id": -1}, None, ()),
        ({"eos_token_id": None}, {}, "<|im_end|>", (1,)),
    ],
)
def test_what_ends_an_answer(folder, generation, config, named, expected):
    write(folder, "config.json", **config)
    if generation is not None:
        write(folder, "generation_config.json", **generation)
    if named:
        write(folder, "special_tokens_map.json", eos_token=named)
    assert Tokenizer.from_folder(folder).eos_token_ids == expected


def test_truncation_and_padding_of_the_file_are_off(byte_level, tmp_path):
    backend = Backend.from_str(byte_level.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "the cat sat on the mat and the rat ran"
    assert Tokenizer.from_folder(tmp_path).encode(text) == byte_level.encode(text).ids
    assert len(byte_level.encode(text).ids) > 8


def test_where_a_chat_template_is_found(folder):
    write(
        folder,
        "tokenizer_config.json",
        chat_template=[{"name": "default", "template": "A"}, {"name": "tool_use", "template": "T"}],
    )
    messages = [{"role": "user", "content": "x"}]
    assert Tokenizer.from_folder(folder).apply_chat_template(messages) == "A"
    assert Tokenizer.from_folder(folder).apply_chat_template(messages, tools=[{"name": "f"}]) == "T"
    write(folder, "chat_template.json", chat_template="B")
    assert Tokenizer.from_folder(folder).chat_template == "B"
    (folder / "chat_template.jinja").write_text("C")
    assert Tokenizer.from_folder(folder).chat_template == "C"


@pytest.mark.parametrize("oracle_class", [GPT2Tokenizer, Qwen2Tokenizer])
def test_vocab_and_merges(byte_level, tmp_path, texts, oracle_class):
    model = json.loads(byte_level.to_str())["model"]
    vocab = {token: id for token, id in byte_level.get_vocab().items() if token != "[TOOL]"}
    write(tmp_path, "vocab.json", **vocab)
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges + "\n")
    write(
        tmp_path,
        "tokenizer_config.json",
        tokenizer_class=oracle_class.__name__,
        bos_token="<|im_end|>",
        eos_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        add_bos_token=oracle_class is GPT2Tokenizer,
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    oracle = oracle_class.from_pretrained(tmp_path)
    for text in texts:
        assert tokenizer.encode(text) == oracle.encode(text), text
    assert tokenizer.encode("")[:1] == ([1] if oracle_class is GPT2Tokenizer else [])


def test_vocab_and_merges_without_settings_are_gpt2s(byte_level, tmp_path):
    write(tmp_path, "vocab.json", **{**byte_level.get_vocab(), "th": 700, "the": 701})
    (tmp_path / "merges.txt").write_text("t h\r\nth e\r\n")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id, tokenizer.special_ids) == ((0,), 0, frozenset({0}))
    assert tokenizer.encode("the<|endoftext|>") == [701, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": True, "add_dummy_prefix": False},
        {"normalization_rule_name": "nfkc", "bos_id": -1},
    ],
)
def test_sentencepiece_file(train_sentencepiece, tmp_path, texts, options):
    data = train_sentencepiece(**options)
    (tmp_path / "tokenizer.model").write_bytes(data)
    model, tokenizer = sentencepiece.SentencePieceProcessor(model_proto=data), Tokenizer.from_folder(tmp_path)
    for text in texts:
        # ours alone: control tokens in the text; the library's: characters before a mark that joins them
        if not any(mark in text for mark in ("<s>", "▁", "\x00", "\u200d", "\u0301", "\u0308", "\u0303")):
            assert tokenizer.encode(text, add_special_tokens=False) == model.encode(text), text
    bos = [1] if model.bos_id() >= 0 else []
    assert tokenizer.encode("a")[: len(bos)] == bos
    assert tokenizer.eos_token_ids == (model.eos_id(),)


def test_missing_tokenizer_names_the_folder_and_the_remedy(tmp_path):
    with pytest.raises(InvalidModel) as refused:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(refused.value) and "skip_tokenizer_init=True" in str(refused.value)
    with pytest.raises(InvalidModel, match="not a folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("tokenizer.json", "{", ["tokenizer.json", "damaged"]),
        ("tokenizer.json", "\xff\xfe", ["tokenizer.json"]),
        ("tokenizer.json", '{"model": {"type": "Crystal"}}', ["tokenizer.json", "not supported"]),
        ("tokenizer_config.json", "[1]", ["tokenizer_config.json", "JSON object"]),
        ("tokenizer_config.json", "[" * 100_000, ["tokenizer_config.json", "JSON"]),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}', ["damaged"]),
        ("generation_config.json", '{"eos_token_id": "end"}', ["eos_token_id='end'"]),
        ("added_tokens.json", '{"a": "b"}', ["damaged"]),
    ],
)
def test_damaged_files_are_refused_by_name(folder, name, content, words):
    (folder / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidModel) as refused:
        Tokenizer.from_folder(folder)
    for word in [str(folder), *words] if "eos_token_id='end'" not in words else words:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


def test_damage_that_shows_only_when_encoding_is_refused_at_load(byte_level, tmp_path):
    """The library panics here, which is no ordinary exception."""
    table = json.loads(byte_level.to_str())
    table["post_processor"] = {
        "type": "TemplateProcessing",
        "pair": [],
        "special_tokens": {},
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
    }
    write(tmp_path, "tokenizer.json", **table)
    with pytest.raises(InvalidModel, match="damaged"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_altered_files_raise_only_our_error(byte_level, train_sentencepiece, tmp_path, name):
    """300 files with bytes changed, cut out or cut off: refused, or a tokenizer that encodes and decodes."""
    whole = byte_level.to_str().encode() if name == "tokenizer.json" else train_sentencepiece(vocab_size=420)
    rng, num_refused = random.Random(1), 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(len(data), 600))
            inserted = rng.choice([b"", b'"', b"{", b"9999999999", b"\xff\xff\xff\x7f", b"null", b"-1"])
            data[at : at + rng.choice([0, 1, 1, 8])] = inserted or bytes([rng.randrange(256)])
        (tmp_path / name).write_bytes(data if rng.random() < 0.9 else data[: rng.randrange(len(data))])
        try:
            tokenizer = Tokenizer.from_folder(tmp_path)
            tokenizer.decode(tokenizer.encode("the cat 😀 [TOOL]"))
        except InvalidModel:
            num_refused += 1
    assert 30 < num_refused < 300


def test_a_model_of_words_is_refused_with_the_remedy(tmp_path):
    import io

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat"] * 9),
        model_writer=model,
        vocab_size=20,
        model_type="word",
        minloglevel=2,
        hard_vocab_limit=False,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    with pytest.raises(InvalidModel, match="word.*tokenizer.json"):
        Tokenizer.from_folder(tmp_path)


def test_prompts_that_are_no_text_are_refused(folder):
    tokenizer = Tokenizer.from_folder(folder)
    with pytest.raises(InvalidRequest, match="U\\+D800.*position 3"):
        tokenizer.encode("abc\ud800")
    with pytest.raises(InvalidRequest, match="not int"):
        tokenizer.encode(7)  # type: ignore[arg-type]


def test_text_of_one_token(folder):
    tokenizer = Tokenizer.from_folder(folder)
    (word,) = tokenizer.encode(" the")
    assert tokenizer.token_text(word) == " the"
    assert tokenizer.token_text(0) == "<|endoftext|>"
    assert tokenizer.token_text(10**6) == ""
    assert tokenizer.token_text(tokenizer.encode("\U00040000")[0]) == "\ufffd"


def test_word_pieces(tmp_path):
    """BERT's kind: the embedding model's tokenizer, whose file pads and truncates."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "##s", "##ting", "!"]
    backend = Backend(models.WordPiece(vocab={word: id for id, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.add_special_tokens(words[:4])
    backend.enable_padding(length=32)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("The cats!") == [2, 4, 5, 7, 9, 3]
    assert tokenizer.encode("The cats!", add_special_tokens=False) == [4, 5, 7, 9]


def test_the_tokenizer_needs_only_the_tokenizers_library(folder):
    import subprocess

    code = (
        "import sys; from penstock.text.tokenizers.tokenizer import Tokenizer; "
        "from penstock.text import answers; "
        f"Tokenizer.from_folder({str(folder)!r}).encode('a'); "
        "print([name for name in ('jinja2', 'transformers', 'gguf', 'torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
