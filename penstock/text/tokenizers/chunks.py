"""Encode long texts in parts, with the same ids as the whole.

A byte-level tokenizer splits words from left to right and never merges across them, so a text can be cut between two
words with no added token near. Other tokenizers get the text in one piece.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as Backend

from penstock.errors import InvalidRequest
from penstock.text.chat.control import SECRET_NAME

PART_CHARS = 1 << 18  # about 40 MB inside the library
MAX_PART_CHARS = 1 << 21
MARGIN_CHARS = 1024  # at a part's end, where the next word is still open
NEAR_CHARS = 64  # added tokens may absorb whitespace beside them
MAX_TRIES = 200
LOCAL = frozenset({"Sequence", "ByteLevel", "Split", "Digits", "Punctuation"})
# Look-around at the text's ends or backwards; `(?!\S)` looks one character ahead.
_FAR = re.compile(r"\(\?=|\(\?!|\(\?<|(?<!\[)\^|\$|\\[bBAzZGK]")


class TextChunker:
    """Cuts texts where that changes no id."""

    def __init__(self, backend: Backend, kind: str) -> None:
        self._backend = backend
        self._normalizer = _describe(backend.normalizer)
        self._byte_fallback = bool(getattr(backend.model, "byte_fallback", False))
        added = list(backend.get_added_tokens_decoder().values())
        self._swallows = any(token.lstrip or token.rstrip for token in added)
        texts = sorted((token.content for token in added), key=len, reverse=True)
        self._added = re.compile("|".join([SECRET_NAME, *map(re.escape, texts)]))
        self._reach = max([NEAR_CHARS, *map(len, texts)]) + NEAR_CHARS
        self._kind = kind
        composes = self._normalizer is None or self._normalizer["type"] == "NFC"
        self._local = kind == "bytes" and composes and _is_local(_describe(backend.pre_tokenizer))
        post = _describe(backend.post_processor)
        self.adds_nothing = post is None or post["type"] == "ByteLevel"

    def max_token_bytes(self, longest: int) -> int | None:
        """Return the most bytes of text one token covers; `longest` is the longest spelling. None if unbounded:
        unknown words, or absorbed whitespace."""
        covers = self._kind == "bytes" or self._kind == "pieces" and self._byte_fallback
        if not covers or self._swallows or not longest or not (self._normalizer is None or self._local):
            return None
        return longest if self._normalizer is None else 4 * longest

    def parts(self, text: str) -> Iterator[str]:
        """Yield the text in parts, cut where that changes no id."""
        begin, size = 0, PART_CHARS
        while self._local and len(text) - begin > size:
            cut = self._cut(text, begin, begin + size)
            if cut is None and size > MAX_PART_CHARS:
                raise InvalidRequest(
                    f"the text has {size} characters in a row that cannot be split for encoding: "
                    "add spaces, or send less"
                )
            if cut is None:
                size *= 2
                continue
            yield text[begin:cut]
            begin, size = cut, PART_CHARS
        yield text[begin:]

    def _cut(self, text: str, begin: int, end: int) -> int | None:
        """Return the last safe cut before `end`, or None if there is none after `begin`."""
        splitter: Any = self._backend.pre_tokenizer
        words: list[tuple[str, tuple[int, int]]] = splitter.pre_tokenize_str(text[begin:end])
        last = end - begin - MARGIN_CHARS
        tries = 0
        for _, (start, _) in reversed(words):
            if start <= 0 or tries > MAX_TRIES:
                return None
            if start <= last:
                tries += 1
                if self._is_free(text, begin + start):
                    return begin + start
        return None

    def _is_free(self, text: str, at: int) -> bool:
        """True if no added token is near, nothing composes, and no whitespace precedes: how a run of it splits
        depends on what follows."""
        window = text[max(0, at - self._reach) : at + self._reach]
        composes = self._normalizer is not None and not unicodedata.is_normalized("NFC", window)
        return text[at].isascii() and not text[at - 1].isspace() and not composes and self._added.search(window) is None


def _describe(part: Any) -> dict[str, Any] | None:
    """Return a part of the library's tokenizer as tokenizer.json has it."""
    return None if part is None else dict(json.loads(part.__getstate__()))


def _is_local(step: dict[str, Any] | None) -> bool:
    """True if words depend on little more than their own characters."""
    if step is None or step["type"] not in LOCAL or step.get("add_prefix_space"):
        return False
    if step["type"] == "Sequence":
        return all(_is_local(one) for one in step["pretokenizers"])
    pattern = step.get("pattern") or {}
    return not _FAR.search(pattern.get("Regex", "").replace(r"(?!\S)", ""))
