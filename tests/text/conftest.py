"""Small tokenizers trained on the spot, and the texts they are tried on."""

from __future__ import annotations

import io
import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

SAMPLES = [
    "", " ", "a", "Hello, world!", "  two  leading and   inner spaces ", "\n\n\nlines\r\n\tand\ttabs\t\t\n ",
    "digits 1 12 123 1234 12345 3.14159 ٣٤٥ ½ ²", "don't I'LL we've they'd it's O'Neil's 'quoted'",
    "emoji 😀👨‍👩‍👧‍👦🏳️‍🌈 and 🫠", "中文字符和日本語のテキスト、한국어", "مرحبا بالعالم שלום עולם",
    "e\u0301 a\u0308 n\u0303 \u0301",
    "naïve café Ærø ŠŽ ﬁ Ⅳ", "def f(x):\n    return x**2  # square\n\n\nclass A:\n\tpass\n",
    "snake_case camelCase PascalCase",
    "<s>[INST] hi [/INST]</s>", "<|im_start|>user\nhi<|im_end|>\n", "aaaaaaa bbbbbb ------ ====== ......",
    "\u200b\u00a0\u3000\ufeff",
    "▁already▁here ▁", "\x00\x01\x7f", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff", "The quick brown fox jumps over the lazy dog. " * 3,
]
CORPUS = [*SAMPLES[1:], "the cat sat on the mat and the rat ran", "a man a plan a canal panama",
          "aa aaa aaaa abab abba",
          "Hello there, world; hello again.", "for i in range(10):\n    print(i)", "1 + 1 = 2, 10 + 10 = 20"]
CHARS = "abcdeé ñ  \n\t'.,-_<>|▁019٣²中文日한שم\u0301😀👍🏽\u200d\x00AZ"


def random_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(CHARS, k=rng.randrange(40))) for _ in range(count)]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return SAMPLES + random_texts(300, seed=0)


@pytest.fixture(scope="session")
def byte_level() -> Backend:
    """Byte-level BPE, GPT-2's splitting, two special tokens and one plain added token."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<|endoftext|>", "<|im_end|>"], show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_tokens(["[TOOL]"])
    return backend


@pytest.fixture(scope="session")
def train_sentencepiece():
    """Makes a SentencePiece BPE model; returns its bytes."""
    import sentencepiece

    def train(**options) -> bytes:
        model = io.BytesIO()
        options = {"vocab_size": 500, "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
                   **options}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS * 3), model_writer=model, model_type="bpe", byte_fallback=True,
            minloglevel=2, hard_vocab_limit=False, num_threads=1, **options)
        return model.getvalue()

    return train
