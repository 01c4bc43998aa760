"""BERT's WordPiece: cut words into the longest known pieces.

GGUF files mark pieces that begin a word; BERT's own vocabulary marks those that continue one.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import WordPiece

from penstock.text.tokenizers import sentencepiece

CONTINUES = "##"
MAX_WORD_CHARS = 100  # longer words are unknown, as in BERT


def add_prefixes(texts: Sequence[str], kinds: Sequence[int]) -> list[str]:
    """Rewrite tokens as BERT's own vocabulary does."""
    return [_add_prefix(text, kind) for text, kind in zip(texts, kinds)]


def _add_prefix(text: str, kind: int) -> str:
    is_named = text[:1] == "[" and text[-1:] == "]" and len(text) > 2  # [unused7]: some files leave it as it is
    if kind in (sentencepiece.CONTROL, sentencepiece.UNKNOWN) or is_named or not text:
        return text
    return text[1:] if text[0] == sentencepiece.SPACE and len(text) > 1 else CONTINUES + text


def has_capitals(texts: Sequence[str]) -> bool:
    """True if the vocabulary is cased: every capital letter is a token."""
    return set(ascii_uppercase) <= set(texts)


def build(texts: Sequence[str], unknown: str | None, lowercase: bool, strip_accents: bool) -> Backend:
    vocabulary = {text: id for id, text in enumerate(texts) if text}
    backend = Backend(
        WordPiece(
            vocabulary,
            unk_token=unknown or "[UNK]",
            max_input_chars_per_word=MAX_WORD_CHARS,
            continuing_subword_prefix=CONTINUES,
        )
    )
    backend.normalizer = normalizers.BertNormalizer(strip_accents=strip_accents, lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=CONTINUES)
    return backend
