"""Replies as callers take them, and the errors that refusals become."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from penstock.errors import InvalidModel, InvalidRequest
from penstock.sandbox import frames
from penstock.sandbox.jobs import Job, Refusal, Reply
from penstock.text.program import TooManyTokens, check_characters

Kind = TypeVar("Kind")
_decoder = msgspec.msgpack.Decoder(Reply)


def packed(job: Job) -> bytearray:
    """A job as it is sent. Half a character, which JSON can spell and no text can have, is refused here."""
    try:
        return frames.pack(job)
    except UnicodeEncodeError as error:
        check_characters(str(error.object))
        raise InvalidRequest("the text has half a character (a lone surrogate): remove it") from None
    except (TypeError, OverflowError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"the messages cannot be read: {error}") from None


def unpacked(body: bytes, kind: type[Kind]) -> Kind:
    reply: Any = _decoder.decode(body)
    if isinstance(reply, Refusal):
        raise _error(reply)
    assert isinstance(reply, kind)
    return reply


def pack_ids(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def ids_of(packed: bytes) -> list[int]:
    ids = array("I")
    ids.frombytes(packed)
    return ids.tolist()


def _error(refusal: Refusal) -> Exception:
    if refusal.kind == "too_long":
        return TooManyTokens(refusal.at_least)
    return InvalidModel(refusal.message) if refusal.kind == "model" else InvalidRequest(refusal.message)
