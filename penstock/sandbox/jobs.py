"""Messages to sandboxed processes, and their replies."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from penstock.errors import InvalidModel, InvalidRequest
from penstock.sandbox import frames
from penstock.text.infill import Gap, Room
from penstock.text.program import TooManyTokens, check_characters
from penstock.text.tokenizers.decoding import TokenizerInfo, TokenNames
from penstock.types import GrammarFacts, StructuredOutputsParams


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load a tokenizer from a folder or a GGUF file's metadata."""

    origin: str
    folder: str | None = None
    metadata: dict[str, Any] | None = None
    template: str | None = None  # replaces its chat templates


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a lane, a process that runs one job after another."""

    number: int
    more_bytes: int
    niceness: int = 0
    cpu_s: float | None = None  # over all its jobs
    grammars: bool = False  # build what grammars share before forking


class Kill(msgspec.Struct, frozen=True, tag=True):
    number: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    facts: TokenizerInfo


class Forked(msgspec.Struct, frozen=True, tag=True):
    """A new lane; its socket comes with the next byte. `pid` is 0 if the fork failed."""

    number: int
    pid: int


class EncodeText(msgspec.Struct, frozen=True, tag=True):
    """Encode a text; refuse one of more than `max_tokens`. `parse_special`: control tokens in it act as such."""

    text: str
    add_special_tokens: bool = True
    max_tokens: int | None = None
    parse_special: bool = True


class EncodeChat(msgspec.Struct, frozen=True, tag=True):
    """Render a conversation with the model's chat template, or `template`, and encode it. `parse_special`: control
    tokens spelled in messages act as such."""

    messages: list[dict[str, Any]]
    values: dict[str, Any]
    max_tokens: int | None = None
    parse_special: bool = False
    template: str | None = None


class RenderChat(msgspec.Struct, frozen=True, tag=True):
    messages: list[dict[str, Any]]
    values: dict[str, Any]


class EncodeInfill(msgspec.Struct, frozen=True, tag=True):
    """Encode a fill-in-the-middle prompt, cut to `room` or refused beyond `max_tokens`."""

    gap: Gap
    room: Room | None = None
    add_special_tokens: bool = True
    max_tokens: int | None = None


class EncodeWords(msgspec.Struct, frozen=True, tag=True):
    """Encode each word as at the start of a text and as after a space."""

    words: list[str]


class DecodeIds(msgspec.Struct, frozen=True, tag=True):
    ids: list[int]


class SpellIds(msgspec.Struct, frozen=True, tag=True):
    """Return the text of ids, or of each id alone, if that needs the tokenizer's own decoder."""

    ids: bytes  # uint32
    alone: bool


class DescribeTokens(msgspec.Struct, frozen=True, tag=True):
    """Return every token as the tokenizer's files write it."""


class CompileGrammar(msgspec.Struct, frozen=True, tag=True):
    """Try a grammar and find its shortest answer; if none fits `max_tokens`, prove the lower bound."""

    asked: StructuredOutputsParams
    max_tokens: int


class Ids(msgspec.Struct, frozen=True, tag=True):
    ids: bytes  # uint32
    text: str | None = None


class Words(msgspec.Struct, frozen=True, tag=True):
    words: list[list[int]]


class Texts(msgspec.Struct, frozen=True, tag=True):
    texts: list[str]


class TextReply(msgspec.Struct, frozen=True, tag=True):
    text: str


class Described(msgspec.Struct, frozen=True, tag=True):
    tokens: TokenNames


class Tried(msgspec.Struct, frozen=True, tag=True):
    facts: GrammarFacts


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The reason for no result. `at_least` tokens, if there are too many."""

    kind: str  # request, model or too_long
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
Reply = Ids | Words | TextReply | Texts | Described | Tried | Refusal


Kind = TypeVar("Kind")
_decoder = msgspec.msgpack.Decoder(Reply)


def pack_job(job: Job) -> bytearray:
    """Pack a job for sending. Refuse lone surrogates, which JSON can spell but no text can have."""
    try:
        return frames.pack(job)
    except UnicodeEncodeError as error:
        check_characters(str(error.object))
        raise InvalidRequest("the text has a lone surrogate: remove it") from None
    except (TypeError, OverflowError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"the messages cannot be read: {error}") from None


def unpack_reply(body: bytes, kind: type[Kind]) -> Kind:
    reply: Any = _decoder.decode(body)
    if isinstance(reply, Refusal):
        raise _error(reply)
    assert isinstance(reply, kind)
    return reply


def pack_ids(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def ids_of(pack_job: bytes) -> list[int]:
    ids = array("I")
    ids.frombytes(pack_job)
    return ids.tolist()


def _error(refusal: Refusal) -> Exception:
    if refusal.kind == "too_long":
        return TooManyTokens(refusal.at_least)
    return InvalidModel(refusal.message) if refusal.kind == "model" else InvalidRequest(refusal.message)
