"""BERT's WordPiece: words cut into the longest pieces that are known.

GGUF files mark the pieces that begin a word; BERT's own vocabulary marks those that go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import WordPiece

from penstock.text import spm

CONTINUES = "##"
MAX_WORD_CHARS = 100  # longer ones are unknown, as BERT's authors have it


def prefixed(texts: Sequence[str], kinds: Sequence[int]) -> list[str]:
    """Tokens as BERT's own vocabulary writes them."""
    return [_prefixed(text, kind) for text, kind in zip(texts, kinds)]


def _prefixed(text: str, kind: int) -> str:
    is_named = text[:1] == "[" and text[-1:] == "]" and len(text) > 2  # [unused7]: some files leave it as it is
    if kind in (spm.CONTROL, spm.UNKNOWN) or is_named or not text:
        return text
    return text[1:] if text[0] == spm.SPACE and len(text) > 1 else CONTINUES + text


def has_capitals(texts: Sequence[str]) -> bool:
    """The vocabulary was made of text with capitals: every capital letter is a token."""
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
