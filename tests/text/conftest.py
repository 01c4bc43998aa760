"""Small tokenizers trained on the spot, and the texts they are tried on."""

from __future__ import annotations

import io
import math
import random
import re
from collections.abc import Callable

import pytest
import regex
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

SAMPLES = [
    "",
    " ",
    "a",
    "Hello, world!",
    "  two  leading and   inner spaces ",
    "\n\n\nlines\r\n\tand\ttabs\t\t\n ",
    "digits 1 12 123 1234 12345 3.14159 ٣٤٥ ½ ²",
    "don't I'LL we've they'd it's O'Neil's 'quoted'",
    "emoji 😀👨‍👩‍👧‍👦🏳️‍🌈 and 🫠",
    "中文字符和日本語のテキスト、한국어",
    "مرحبا بالعالم שלום עולם",
    "e\u0301 a\u0308 n\u0303 \u0301",
    "naïve café Ærø ŠŽ ﬁ Ⅳ",
    "def f(x):\n    return x**2  # square\n\n\nclass A:\n\tpass\n",
    "snake_case camelCase PascalCase",
    "<s>[INST] hi [/INST]</s>",
    "<|im_start|>user\nhi<|im_end|>\n",
    "aaaaaaa bbbbbb ------ ====== ......",
    "\u200b\u00a0\u3000\ufeff",
    "▁already▁here ▁",
    "\x00\x01\x7f",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff",
    "The quick brown fox jumps over the lazy dog. " * 3,
]
CORPUS = [
    *SAMPLES[1:],
    "the cat sat on the mat and the rat ran",
    "a man a plan a canal panama",
    "aa aaa aaaa abab abba",
    "Hello there, world; hello again.",
    "for i in range(10):\n    print(i)",
    "1 + 1 = 2, 10 + 10 = 20",
]
CHARS = "abcdeé ñ  \n\t'.,-_<>|▁019٣²中文日한שم\u0301😀👍🏽\u200d\x00AZ"


def random_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(CHARS, k=rng.randrange(40))) for _ in range(count)]


class NaivePieces:
    """SentencePiece as written on paper: user-defined tokens apart, then again and again the best-scored neighbours."""

    def __init__(self, metadata: dict) -> None:
        tokens, kinds, scores = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "scores"))
        self.ids = {token: id for id, token in enumerate(tokens)}
        self.score = {token: score for token, kind, score in zip(tokens, kinds, scores) if kind == 1}
        apart = [token for token, kind in zip(tokens, kinds) if kind in (3, 4)]
        self.apart = re.compile("(" + "|".join(map(re.escape, sorted(apart, key=len, reverse=True))) + ")")

    def encode(self, text: str) -> list[int]:
        out = []
        for place, part in enumerate(self.apart.split(text)):
            if place % 2:
                out.append(self.ids[part])
                continue
            symbols = merge(list(part.replace(" ", "▁")), lambda pair: -self.score.get("".join(pair), -math.inf))
            for symbol in symbols:
                byte_tokens = [f"<0x{byte:02X}>" for byte in symbol.encode()]
                out += [self.ids[token] for token in ([symbol] if symbol in self.score else byte_tokens)]
        return out


class NaiveBytes:
    """Byte-level BPE as written on paper: each pattern cuts what the one before left, then the merges by rank."""

    def __init__(self, metadata: dict, patterns: list[str], whole_words: bool = False) -> None:
        self.patterns, self.whole_words = patterns, whole_words
        self.ids = {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
        moved = [byte for byte in range(256) if byte not in kept]
        self.char = {**{byte: chr(byte) for byte in kept}, **{byte: chr(256 + at) for at, byte in enumerate(moved)}}

    def encode(self, text: str) -> list[int]:
        words = [text]
        for pattern in self.patterns:
            words = [part for word in words for part in regex.split(f"({pattern})", word) if part]
        out = []
        for word in words:
            symbols = [self.char[byte] for byte in word.encode()]
            if self.whole_words and "".join(symbols) in self.ids:
                symbols = ["".join(symbols)]
            out += [self.ids[symbol] for symbol in merge(symbols, lambda pair: self.ranks.get(pair, math.inf))]
        return out


def merge(symbols: list[str], cost: Callable[[tuple[str, str]], float]) -> list[str]:
    """Join the cheapest neighbours, the leftmost first, until no two may be joined."""
    while len(symbols) > 1:
        costs = [cost(pair) for pair in zip(symbols, symbols[1:])]
        at = costs.index(min(costs))
        if costs[at] == math.inf:
            break
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    return symbols


@pytest.fixture(scope="session")
def naive_pieces() -> type[NaivePieces]:
    return NaivePieces


@pytest.fixture(scope="session")
def naive_bytes() -> type[NaiveBytes]:
    return NaiveBytes


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return SAMPLES + random_texts(300, seed=0)


@pytest.fixture(scope="session")
def byte_level() -> Backend:
    """Byte-level BPE, GPT-2's splitting, two special tokens and one plain added token."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_tokens(["[TOOL]"])
    return backend


@pytest.fixture(scope="session")
def train_sentencepiece():
    """Makes a SentencePiece BPE model; returns its bytes."""
    import sentencepiece

    def train(**options) -> bytes:
        model = io.BytesIO()
        options = {
            "vocab_size": 500,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            **options,
        }
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS * 3),
            model_writer=model,
            model_type="bpe",
            byte_fallback=True,
            minloglevel=2,
            hard_vocab_limit=False,
            num_threads=1,
            **options,
        )
        return model.getvalue()

    return train
