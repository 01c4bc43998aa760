"""Messages to sandboxed processes and their replies."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.text.facts import TokenizerFacts, TokenNames
from penstock.text.infill import Gap, Room
from penstock.types import GrammarFacts, StructuredOutputsParams


class Load(msgspec.Struct, frozen=True, tag=True):
    """Read a tokenizer: from a folder, or from a GGUF file's metadata."""

    origin: str
    folder: str | None = None
    metadata: dict[str, Any] | None = None
    template: str | None = None  # in place of its own chat templates


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Begin a lane, a process that does one job after another."""

    number: int
    more_bytes: int
    niceness: int = 0
    cpu_s: float | None = None  # of all its jobs together
    grammars: bool = False  # make what all grammars share before forking


class Kill(msgspec.Struct, frozen=True, tag=True):
    number: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    facts: TokenizerFacts


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The lane's socket comes with the next byte; `pid` is 0 where no process could be made."""

    number: int
    pid: int


class EncodeText(msgspec.Struct, frozen=True, tag=True):
    """A text's ids; refused where there are more than `max_tokens`."""

    text: str
    add_special_tokens: bool = True
    max_tokens: int | None = None


class EncodeChat(msgspec.Struct, frozen=True, tag=True):
    """A conversation's prompt by the model's chat template, or by `template`, and its ids. `parse_special`: control
    tokens written in the messages are control tokens."""

    messages: list[dict[str, Any]]
    values: dict[str, Any]
    max_tokens: int | None = None
    parse_special: bool = False
    template: str | None = None


class RenderChat(msgspec.Struct, frozen=True, tag=True):
    messages: list[dict[str, Any]]
    values: dict[str, Any]


class EncodeInfill(msgspec.Struct, frozen=True, tag=True):
    """A prompt for what stands between two texts, cut to `room` or refused beyond `max_tokens`."""

    gap: Gap
    room: Room | None = None
    add_special_tokens: bool = True
    max_tokens: int | None = None


class EncodeWords(msgspec.Struct, frozen=True, tag=True):
    """Each word's ids at the start of a text and after a space."""

    words: list[str]


class DecodeIds(msgspec.Struct, frozen=True, tag=True):
    ids: list[int]


class SpellIds(msgspec.Struct, frozen=True, tag=True):
    """The text of ids, or each id's by itself, where spelling takes the tokenizer's own decoder."""

    ids: bytes  # 32-bit numbers
    alone: bool


class DescribeTokens(msgspec.Struct, frozen=True, tag=True):
    """Every token as the tokenizer's files write it."""


class CompileGrammar(msgspec.Struct, frozen=True, tag=True):
    """Try a grammar, and find how short an answer can be; where none of `max_tokens` is known, prove the least."""

    asked: StructuredOutputsParams
    max_tokens: int


class Ids(msgspec.Struct, frozen=True, tag=True):
    ids: bytes  # 32-bit numbers
    text: str | None = None


class Words(msgspec.Struct, frozen=True, tag=True):
    words: list[list[int]]


class Texts(msgspec.Struct, frozen=True, tag=True):
    texts: list[str]


class Text(msgspec.Struct, frozen=True, tag=True):
    text: str


class Described(msgspec.Struct, frozen=True, tag=True):
    tokens: TokenNames


class Tried(msgspec.Struct, frozen=True, tag=True):
    facts: GrammarFacts


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Why there is no result. `at_least` tokens, where there are too many."""

    kind: str  # request, model, too_long
    message: str
    at_least: int = 0


Control = Load | Fork | Kill
Job = (
    EncodeText
    | EncodeChat
    | RenderChat
    | EncodeInfill
    | EncodeWords
    | DecodeIds
    | SpellIds
    | DescribeTokens
    | CompileGrammar
)
Reply = Ids | Words | Text | Texts | Described | Tried | Refusal
