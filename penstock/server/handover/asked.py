"""The router's headers: it asks a prefill server to compute a prompt, and tells a decode server where that was done."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from starlette.types import Scope

from penstock.server.http.errors import ApiError

if TYPE_CHECKING:
    from penstock.types import Request

PREFILL_HEADER, TAKE_HEADER = b"penstock-prefill", b"penstock-handed-over"
HANDOVER = "handover"  # scope key


class HandedOver(msgspec.Struct, frozen=True):
    """The part of a prefill server: its URL, what it computed in which time, and the address that has the blocks; empty
    where they are in files that both reach."""

    server: str
    num_tokens: int
    seconds: float
    source: str = ""


class HandoverAsked:
    """Asks to compute prompts and answer nothing; or, with `taken`, to go on from what was computed."""

    def __init__(self, taken: HandedOver | None = None) -> None:
        self.taken = taken

    @property
    def is_prefill(self) -> bool:
        return self.taken is None

    def take(self, requests: Sequence[Request]) -> list[Request]:
        """Tell requests where their blocks are."""
        source = "" if self.taken is None else self.taken.source
        return [replace(one, blocks_from=source) for one in requests] if source else list(requests)


def read_handover(scope: Scope) -> HandoverAsked | None:
    """Read the headers of a router that has proved its key."""
    for name, value in scope["headers"]:
        if name == PREFILL_HEADER:
            return HandoverAsked()
        if name == TAKE_HEADER:
            try:
                return HandoverAsked(msgspec.json.decode(value, type=HandedOver))
            except msgspec.DecodeError as error:
                raise ApiError(400, f"{TAKE_HEADER.decode()} cannot be read: {error}") from None
    return None


def is_prefill() -> bool:
    """True if the current request is for its prompts alone."""
    asked = CURRENT_HANDOVER.get()
    return asked is not None and asked.is_prefill


CURRENT_HANDOVER: ContextVar[HandoverAsked | None] = ContextVar("penstock_handover", default=None)
