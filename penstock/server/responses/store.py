"""Responses kept for clients that come back to them: the latest of each tenant, in memory, within bounds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from pydantic import TypeAdapter

from penstock.errors import shown
from penstock.server.errors import ApiError
from penstock.server.responses.items import Item, listed

MOST_RESPONSES = 1000
MOST_BYTES = 32_000_000

_items: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


@dataclass(frozen=True)
class Kept:
    """A response and all items of its input, those of earlier responses among them, as JSON."""

    response: bytes
    items: bytes
    events: tuple[bytes, ...] = ()  # of one that was streamed in the background

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items) + sum(map(len, self.events))

    def conversation(self) -> list[Item]:
        """The input's items and the output's: what a response that follows this one begins with."""
        output = msgspec.json.decode(self.response)["output"]
        return _items.validate_python([*msgspec.json.decode(self.items), *output])


def encode(items: Sequence[Item]) -> bytes:
    """The items as they are kept and shown."""
    return msgspec.json.encode([listed(item) for item in items])


class ResponseStore:
    def __init__(self, most_responses: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._most_responses, self._most_bytes = most_responses, most_bytes
        self._tenants: dict[str, OrderedDict[str, Kept]] = {}
        self._num_bytes: dict[str, int] = {}
        self._lock = threading.Lock()  # large responses are kept from other threads

    def keep(self, tenant: str, response: dict[str, Any], items: Sequence[Item] | bytes) -> None:
        """Keep a response with its input's items, or with what `encode` made of them; the oldest make room for it.
        One that is larger than the room is not kept, and neither is what was kept of it before."""
        kept = Kept(msgspec.json.encode(response), items if isinstance(items, bytes) else encode(items))
        if not self._put(tenant, response["id"], kept) and response["id"] in self._tenants.get(tenant, ()):
            self.forget(tenant, response["id"])

    def keep_events(self, tenant: str, id: str, events: Sequence[bytes]) -> None:
        """Keep a response's events with it, if there is room and it is still here."""
        own = self._tenants.get(tenant)
        if own is not None and id in own:
            self._put(tenant, id, replace(own[id], events=tuple(events)))

    def _put(self, tenant: str, id: str, kept: Kept) -> bool:
        """False where there is no room for so much."""
        if kept.num_bytes > self._most_bytes:
            return False
        with self._lock:
            own = self._tenants.setdefault(tenant, OrderedDict())
            before = own.pop(id, None)
            own[id] = kept
            self._num_bytes[tenant] = (
                self._num_bytes.get(tenant, 0) + kept.num_bytes - (0 if before is None else before.num_bytes)
            )
            while len(own) > self._most_responses or self._num_bytes[tenant] > self._most_bytes:
                _, oldest = own.popitem(last=False)
                self._num_bytes[tenant] -= oldest.num_bytes
        return True

    def find(self, tenant: str, id: str, param: str | None = None) -> Kept:
        own = self._tenants.get(tenant)
        kept = own.get(id) if own is not None else None
        if kept is None:
            raise ApiError(
                404,
                f"the response {shown(id)} is not kept here: it was made with store=false, deleted, "
                f"made by another client, or is older than the last {self._most_responses} or "
                f"{self._most_bytes // 1_000_000} MB",
                param=param,
                code="response_not_found",
            )
        return kept

    def forget(self, tenant: str, id: str) -> None:
        with self._lock:
            self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) - self.find(tenant, id).num_bytes
            del self._tenants[tenant][id]
