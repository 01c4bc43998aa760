"""Kinds of GGUF vocabulary that came later, each against a tokenizer of the same definition."""

from __future__ import annotations

import importlib
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from penstock.errors import InvalidModel
from penstock.text.tokenizers.pre_tokenizers import SPLITTINGS
from penstock.text.tokenizers.sentencepiece import build, read_model
from penstock.text.tokenizers.tokenizer import Tokenizer
from tests.text.test_gguf import CASED, GPT2, WORDS, K
from tests.text.test_gguf import bpe as bpe

ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LEAD = r"[^\r\n\p{L}\p{N}]?"
CASED_3 = CASED % {"end": ENDING + "?", "digits": r"\p{N}{1,3}"}
MARKED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])", r"(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])"
# the published patterns, each applied to what the one before left apart
PATTERNS = {
    "qwen35": [ENDING + "|" + LEAD + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "mellum2": [r"\p{N}", GPT2],
    "minimax-m2": [CASED_3],
    "granite-embed-multi-97m": [CASED_3],
    "tiny_aya": [r"\d{1,3}(?=(?:\d{3})*\b)", CASED_3],
    "afmoe": [
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff\u1780-\u17ff"
        r"\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        MARKED,
    ],
    "minicpm5": [r"\p{N}{1,3}", WORDS % r"\p{N}+"],
    "laguna": [r"[^\n]+|\n+", WORDS % r"\p{N}"],
    "seed-coder": [ENDING + "|" + LEAD + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "bailingmoe2": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
        r"|\s+(?!\S)|\s+"
    ],
    "exaone-moe": [
        ENDING + "|" + LEAD + r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]"
        r"|\s+(?!\S)|\s+"
    ],
    "kimi-k2": [
        r"\p{Han}+|"
        + "".join(f"{LEAD}{UPPER}{a}{LOWER}{b}{ENDING}?|" for a, b in ("*+", "+*"))
        + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "jais-2": [
        ENDING + "|" + LEAD + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{8}(?!\S)|\s{4}(?!\S)"
        r"|\s{1,2}(?!\S)|\s{1}"
    ],
}


@pytest.mark.parametrize("name", PATTERNS)
def test_byte_level_encodes_as_published(bpe: dict[str, Any], texts: list[str], name: str, naive_bytes: Any) -> None:
    metadata, splitting = {**bpe, K + "pre": name}, SPLITTINGS[name]
    tokenizer, naive = Tokenizer.from_gguf(metadata), naive_bytes(metadata, PATTERNS[name], splitting.whole_words)
    for text in texts:
        if "<|" not in text:
            composed = unicodedata.normalize("NFC", text) if splitting.compose else text
            assert tokenizer.encode(text, add_special_tokens=False) == naive.encode(composed), text


def words(bpe: dict[str, Any], name: str, text: str) -> list[str]:
    made = Tokenizer.from_gguf({**bpe, K + "pre": name, K + "merges": []})._backend.pre_tokenizer
    return [text[start:end] for _, (start, end) in made.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("deepseek-llm", "Ab éß 中文x 1234\n!?ა", ["Ab", " éß", " ", "中文", "x", " ", "1234", "\n", "!?", "ა"]),
        ("deepseek-llm", "a  ", ["a", "  "]),
        ("superbpe", "ab cd 1234567!", ["ab cd ", "1", "234", "567", "!"]),
        ("afmoe", "12345 x", ["12", "345", " x"]),
        ("youtu", "한국 Abc'ss１，中", ["한국", " Abc's", "s", "１", "，", "中"]),
        ("chameleon", "a 12IMGIMGABZab\t!!", ["a", " ", "1", "2", "IMGIMGABZ", "ab", "\t", "!", "!"]),
    ],
)
def test_words(bpe: dict[str, Any], name: str, text: str, expected: list[str]) -> None:
    assert words(bpe, name, text) == expected


@pytest.fixture(scope="module")
def wordpiece(texts: list[str]) -> Backend:
    made = Backend(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    clean = [text for text in texts[::2] if "▁" not in text]  # the sign of GGUF's own spelling
    made.train_from_iterator(
        clean, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    )
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


def bert_metadata(theirs: Backend) -> dict[str, Any]:
    special = theirs.get_added_tokens_decoder()
    tokens = [theirs.id_to_token(id) or "" for id in range(theirs.get_vocab_size())]
    written = [
        text if id in special else text[2:] if text.startswith("##") else "▁" + text for id, text in enumerate(tokens)
    ]
    return {
        "general.architecture": "bert",
        K + "model": "bert",
        K + "pre": "bert-bge",
        K + "tokens": written,
        K + "token_type": [3 if id in special else 1 for id in range(len(tokens))],
        K + "unknown_token_id": 1,
        K + "cls_token_id": 2,
        K + "seperator_token_id": 3,
        K + "padding_token_id": 0,
    }


def test_wordpiece_equals_its_definition(wordpiece: Backend, texts: list[str]) -> None:
    ours = Tokenizer.from_gguf(bert_metadata(wordpiece))
    assert ours.special_ids == {0, 1, 2, 3, 4} and ours.eos_token_ids == ()
    for text in [*texts, "x" * 101, "[MASK] a[SEP]"]:
        ids = wordpiece.encode(text).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == wordpiece.decode(ids)


@pytest.mark.parametrize(("change", "is_lower"), [({}, True), ({K + "normalizer.lowercase": False}, False)])
def test_wordpiece_with_and_without_capitals(wordpiece: Backend, change: dict[str, Any], is_lower: bool) -> None:
    ours = Tokenizer.from_gguf({**bert_metadata(wordpiece), **change})
    assert (ours.encode("THE") == ours.encode("the")) is is_lower


def test_capitals_in_the_vocabulary_say_that_case_matters(wordpiece: Backend) -> None:
    metadata = bert_metadata(wordpiece)
    capitals = [f"▁{chr(code)}" for code in range(65, 91)]
    metadata[K + "tokens"] += capitals
    metadata[K + "token_type"] += [1] * len(capitals)
    assert Tokenizer.from_gguf(metadata).decode(Tokenizer.from_gguf(metadata).encode("Q")) == "Q"


@pytest.fixture(scope="module")
def gemma(texts: list[str]) -> Backend:
    """As Gemma 4's tokenizer.json: spaces written as a sign, no words, bytes for what is unknown."""
    made = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special + bytes_, show_progress=False)
    made.train_from_iterator([text.replace("\n", "") for text in texts[::2]], trainer)
    made.add_tokens([AddedToken("\n" * size, normalized=False) for size in range(2, 6)])
    return made


def gemma_metadata(theirs: Backend) -> dict[str, Any]:
    tokens = [theirs.id_to_token(id) or "" for id in range(theirs.get_vocab_size())]
    kinds = [
        3 if id < 5 else 6 if id < 261 else 4 if text == "\n" * len(text) and len(text) > 1 else 1
        for id, text in enumerate(tokens)
    ]
    merges = [" ".join(merge) for merge in json.loads(theirs.to_str())["model"]["merges"]]
    return {
        "general.architecture": "gemma4",
        K + "model": "gemma4",
        K + "tokens": tokens,
        K + "token_type": kinds,
        K + "merges": merges,
        K + "unknown_token_id": 3,
        K + "bos_token_id": 2,
        K + "eos_token_id": 1,
        K + "scores": [-1000.0] * len(tokens),
    }


@pytest.mark.parametrize("change", [{}, {K + "model": "gpt2", K + "pre": "gemma4"}])
def test_merged_pieces_equal_their_definition(gemma: Backend, texts: list[str], change: dict[str, Any]) -> None:
    ours = Tokenizer.from_gguf({**gemma_metadata(gemma), **change})
    for text in texts:
        ids = gemma.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.encode(text) == [2, *ids]
        assert ours.decode(ids, skip_special_tokens=False) == gemma.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def unigram(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A unigram model that SentencePiece trained, with its normalization of characters."""
    sentencepiece = pytest.importorskip("sentencepiece")
    path = tmp_path_factory.mktemp("unigram") / "spiece"
    lines = [line for text in texts for line in text.splitlines() if line.strip() and "\0" not in line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 3),
        model_prefix=str(path),
        vocab_size=260,
        model_type="unigram",
        hard_vocab_limit=False,
        character_coverage=0.985,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=f"{path}.model"), path.with_suffix(".model")


def unigram_metadata(theirs: Any, path: Path) -> dict[str, Any]:
    model = importlib.import_module("sentencepiece.sentencepiece_model_pb2").ModelProto()
    model.ParseFromString(path.read_bytes())
    return {
        "general.architecture": "bert",
        K + "model": "t5",
        K + "tokens": [piece.piece for piece in model.pieces],
        K + "scores": [piece.score for piece in model.pieces],
        K + "token_type": [piece.type for piece in model.pieces],
        K + "precompiled_charsmap": list(model.normalizer_spec.precompiled_charsmap),
        K + "unknown_token_id": theirs.unk_id(),
        K + "bos_token_id": theirs.bos_id(),
        K + "eos_token_id": theirs.eos_id(),
    }


def is_plain(text: str) -> bool:
    """No special token, which SentencePiece reads as text; no character that joins others, which the tokenizers library
    rewrites together with them."""
    joins = any(unicodedata.category(each) in ("Mn", "Mc", "Me", "Cf", "Sk") for each in text)
    return not joins and not any(each in text for each in ("<s>", "</s>", "<unk>", "\0"))


def test_unigram_equals_sentencepiece(unigram: Any, texts: list[str]) -> None:
    theirs, path = unigram
    tokenizer = Tokenizer.from_gguf(unigram_metadata(theirs, path))
    plain = [text for text in texts if is_plain(text)]
    assert len(plain) > 20
    for text in [*plain, "", " ", "  a  b ", "ﬁn Å½", "<0x41>"]:
        assert tokenizer.encode(text, add_special_tokens=False) == theirs.encode(text), text
        assert tokenizer.encode(text) == [*theirs.encode(text), theirs.eos_id()]
        if theirs.unk_id() not in theirs.encode(text):
            assert tokenizer.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))


def test_a_charsmap_holds_bytes(unigram: Any) -> None:
    with pytest.raises(InvalidModel, match="precompiled_charsmap must hold bytes"):
        Tokenizer.from_gguf(unigram_metadata(*unigram) | {K + "precompiled_charsmap": [0, 300]})


def test_a_unigram_model_file_is_read_like_the_metadata(unigram: Any, texts: list[str]) -> None:
    theirs, path = unigram
    pieces, _, _ = read_model(path)
    backend = build(pieces, str(path))
    for text in texts:
        if is_plain(text):
            assert backend.encode(text, add_special_tokens=False).ids == theirs.encode(text), text
