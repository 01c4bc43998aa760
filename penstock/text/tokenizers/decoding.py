"""Decode ids one at a time.

Three kinds of tokenizer:

* bytes: every token is a run of bytes (byte-level BPE). The text is their UTF-8 decoding; a malformed sequence becomes
  one U+FFFD.
* pieces: every token is text, and the tokens <0x00> … <0xFF> are single bytes (SentencePiece with byte fallback). A
  byte that completes no character becomes one U+FFFD, as in SentencePiece.
* pairs: any other decoder. The `tokenizers` library tells what a token adds after another.

In all three, decoding everything equals the sum of what the ids add one by one.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from penstock.text.infill import InfillTokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# surrogateescape maps each undecodable byte to one of these
_ESCAPED = {code: "\ufffd" for code in range(0xDC80, 0xDD00)}


class DecodeStream(Protocol):
    """Ids in, text out; an incomplete character waits for the next id."""

    def push(self, ids: Iterable[int]) -> str: ...

    def push_one(self, id: int) -> str: ...

    def finish(self) -> str: ...


@lru_cache(maxsize=1)
def byte_of_char() -> Mapping[str, int]:
    """Map byte-level BPE's printable characters to bytes: those of latin-1 as they are, the rest from U+0100 on."""
    bytes_by_char = {}
    spare = 0x100
    for value in range(256):
        char = chr(value)
        if not (char.isprintable() and char != " "):
            char, spare = chr(spare), spare + 1
        bytes_by_char[char] = value
    return bytes_by_char


@dataclass(frozen=True)
class TokenDecoder:
    """The way a backend's tokens become text, from its decoder's own description."""

    kind: str  # bytes, pieces or pairs
    replace: tuple[tuple[str, str], ...] = ()  # pieces: replacements in each token
    strips: bool = False  # pieces: drop a space at the very start of the text

    @classmethod
    def of(cls, backend: Backend) -> TokenDecoder:
        steps = _steps(backend)
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls("bytes")
        replace = []
        while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
            replace.append((steps[0]["pattern"]["String"], steps[0]["content"]))
            steps = steps[1:]
        kinds = [step["type"] for step in steps]
        if kinds in (["ByteFallback", "Fuse"], ["ByteFallback"]):
            return cls("pieces", tuple(replace))
        if kinds == ["ByteFallback", "Fuse", "Strip"] and _strips_one_space(steps[2]):
            return cls("pieces", tuple(replace), strips=True)
        return cls("pairs")


def _steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    described = json.loads(backend.decoder.__getstate__())
    return described["decoders"] if described["type"] == "Sequence" else [described]


def _strips_one_space(step: dict[str, Any]) -> bool:
    return bool(step["content"] == " " and step["start"] == 1 and step["stop"] == 0)


class Tokens(Protocol):
    """The part of `tokenizers.Tokenizer` that spelling needs."""

    def id_to_token(self, id: int) -> str | None: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass
class TokenSpelling:
    """The spelling of every id, cached on first use."""

    backend: Tokens
    decoder: TokenDecoder
    aliases: Mapping[int, int] = field(default_factory=dict)  # ids of equal text: the one the backend knows
    added: frozenset[int] = frozenset()  # ids matched in raw text, so spelled verbatim
    known: dict[int, str | bytes] = field(default_factory=dict)

    def __getitem__(self, id: int) -> str | bytes:
        """Return text or bytes; empty for an id the vocabulary lacks."""
        spelled = self.known.get(id)
        if spelled is None:
            spelled = self.known[id] = self._spell(id)
        return spelled

    def _spell(self, id: int) -> str | bytes:
        id = self.aliases.get(id, id)
        token = self.backend.id_to_token(id) if 0 <= id < 2**32 else None
        if token is None:
            return b"" if self.decoder.kind == "bytes" else ""
        if self.decoder.kind == "bytes":
            bytes_by_char = byte_of_char()
            if id in self.added or any(char not in bytes_by_char for char in token):
                return token.encode()
            return bytes(bytes_by_char[char] for char in token)
        if self.decoder.kind == "pieces":
            for old, new in self.decoder.replace:
                token = token.replace(old, new)
            byte = BYTE_TOKEN.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token
        return token

    def stream(self) -> DecodeStream:
        if self.decoder.kind == "bytes":
            return ByteStream(self)
        return PieceStream(self) if self.decoder.kind == "pieces" else PairStream(self)

    def tail(self, ids: Sequence[int], hidden: frozenset[int]) -> list[int]:
        """Return the last ids that affect what the next one adds: at most three bytes are unfinished."""
        kept: list[int] = []
        num_bytes = 0
        for id in reversed(ids):
            if id in hidden or not (spelled := self[id]):
                continue
            kept.append(id)
            num_bytes += len(spelled)
            if isinstance(spelled, str) or self.decoder.kind == "bytes" and num_bytes >= 3:
                break
        return kept[::-1]

    def alone(self, id: int) -> str:
        """Return an id's text by itself: leading space kept, half a character as U+FFFD."""
        spelled = self[id]
        if isinstance(spelled, bytes):
            return spelled.decode(errors="replace")
        if spelled and self.decoder.kind == "pairs":
            return self.backend.decode([id], skip_special_tokens=False)
        return spelled


class ByteStream:
    def __init__(self, spelling: TokenSpelling) -> None:
        self._spelling = spelling
        self._utf8: Any = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        text: str = self._utf8.decode(b"".join([self._spelling[id] for id in ids]))  # type: ignore[misc]
        return text

    def push_one(self, id: int) -> str:
        spelled: Any = self._spelling[id]
        text: str = spelled.decode() if spelled.isascii() and not self._utf8.buffer else self._utf8.decode(spelled)
        return text

    def finish(self) -> str:
        rest: str = self._utf8.decode(b"", final=True)
        return rest


class PieceStream:
    def __init__(self, spelling: TokenSpelling) -> None:
        self._spelling = spelling
        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._strips = spelling.decoder.strips

    def push(self, ids: Iterable[int]) -> str:
        parts = []
        for id in ids:
            spelled = self._spelling[id]
            if isinstance(spelled, bytes):
                parts.append(self._utf8.decode(spelled).translate(_ESCAPED))
            elif spelled:
                parts.append(self.finish())
                parts.append(spelled)
        text = "".join(parts)
        if self._strips and text:
            self._strips = False
            return text.removeprefix(" ")
        return text

    def push_one(self, id: int) -> str:
        return self.push((id,))

    def finish(self) -> str:
        rest = self._utf8.decode(b"", final=True).translate(_ESCAPED)
        self._utf8.reset()
        return rest


class PairStream:
    def __init__(self, spelling: TokenSpelling) -> None:
        self._spelling = spelling
        self._last: int | None = None

    def push(self, ids: Iterable[int]) -> str:
        decode, parts = self._spelling.backend.decode, []
        for id in ids:
            if not self._spelling[id]:
                continue
            before = [] if self._last is None else [self._last]
            text = decode(before + [id], skip_special_tokens=False)
            parts.append(text[len(decode(before, skip_special_tokens=False)) :])
            self._last = id
        return "".join(parts)

    def push_one(self, id: int) -> str:
        return self.push((id,))

    def finish(self) -> str:
        return ""


@dataclass(frozen=True)
class TokenizerInfo:
    """Everything about a tokenizer but its code."""

    kind: str  # of decoder
    strips: bool  # drop a space at the very start of a text
    spellings: list[Any]  # by id, bytes or str
    special_ids: list[int]
    eos_token_ids: list[int]
    bos_token_id: int | None
    chat_template: str | None
    max_token_bytes: int | None  # of text per token; None: unbounded
    infill: InfillTokens | None = None  # fill-in-the-middle tokens, if any


@dataclass(frozen=True)
class TokenNames:
    """Tokens as the tokenizer's files write them, which may differ from what they spell."""

    tokens: list[str | None]  # by id; None: no such id
    num_base: int  # without added tokens
    named: dict[str, str]  # eos_token, pad_token, …
