"""Store responses, and run them in the background: clients poll, follow or cancel them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from pydantic import TypeAdapter

from penstock.errors import Busy, quote
from penstock.server.http import sse
from penstock.server.http.errors import ApiError, to_api_error
from penstock.server.responses.answer import ResponseAnswer
from penstock.server.responses.body import Item, list_item

MAX_RESPONSES = 1000
MAX_BYTES = 32_000_000
_items: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
MAX_RUNNING = 64  # per tenant
RETRY_S = 5
PIECE_BYTES = 1 << 16  # sent to a follower at once


@dataclass(frozen=True)
class StoredResponse:
    """A response with all its input items, earlier responses' included, as JSON."""

    response: bytes
    items: bytes
    events: tuple[bytes, ...] = ()  # of a streamed background response

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items) + sum(map(len, self.events))

    def list_items(self) -> list[Item]:
        """List input and output items: what a following response begins with."""
        output = msgspec.json.decode(self.response)["output"]
        return _items.validate_python([*msgspec.json.decode(self.items), *output])


def encode_items(items: Sequence[Item]) -> bytes:
    return msgspec.json.encode([list_item(item) for item in items])


class ResponseStore:
    """The latest responses of each tenant."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._tenants: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._num_bytes: dict[str, int] = {}
        self._lock = threading.Lock()  # large responses are stored from other threads

    def put(self, tenant: str, response: dict[str, Any], items: Sequence[Item] | bytes) -> None:
        """Store a response with its input items (or their encoding), evicting the oldest. One that exceeds the limit is
        not stored, and its earlier state is dropped."""
        stored = StoredResponse(
            msgspec.json.encode(response), items if isinstance(items, bytes) else encode_items(items)
        )
        if not self._put(tenant, response["id"], stored) and response["id"] in self._tenants.get(tenant, ()):
            self.delete(tenant, response["id"])

    def put_events(self, tenant: str, id: str, events: Sequence[bytes]) -> None:
        """Store a response's events with it, if they fit and it is still stored."""
        own = self._tenants.get(tenant)
        if own is not None and id in own:
            self._put(tenant, id, replace(own[id], events=tuple(events)))

    def _put(self, tenant: str, id: str, stored: StoredResponse) -> bool:
        """Store; False if it exceeds the limit."""
        if stored.num_bytes > self._max_bytes:
            return False
        with self._lock:
            own = self._tenants.setdefault(tenant, OrderedDict())
            before = own.pop(id, None)
            own[id] = stored
            self._num_bytes[tenant] = (
                self._num_bytes.get(tenant, 0) + stored.num_bytes - (0 if before is None else before.num_bytes)
            )
            while len(own) > self._max_responses or self._num_bytes[tenant] > self._max_bytes:
                _, oldest = own.popitem(last=False)
                self._num_bytes[tenant] -= oldest.num_bytes
        return True

    def find(self, tenant: str, id: str, param: str | None = None) -> StoredResponse:
        own = self._tenants.get(tenant)
        stored = own.get(id) if own is not None else None
        if stored is None:
            raise ApiError(
                404,
                f"the response {quote(id)} is not stored: it was made with store=false, deleted, "
                f"made by another client, or is older than the last {self._max_responses} or "
                f"{self._max_bytes // 1_000_000} MB",
                param=param,
                code="response_not_found",
            )
        return stored

    def delete(self, tenant: str, id: str) -> None:
        with self._lock:
            self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) - self.find(tenant, id).num_bytes
            del self._tenants[tenant][id]


class EventLog:
    """A response's events so far; an event's index is its sequence number."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.is_dropped = False  # it grew too large
        self._is_over = False
        self._changed = asyncio.Event()

    def add(self, chunk: bytes) -> None:
        self.events += [event + sse.END for event in chunk.split(sse.END) if event]
        self._notify()

    def drop(self) -> None:
        self.events, self.is_dropped = [], True
        self._notify()

    def end(self) -> None:
        self._is_over = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yield the events after sequence number `after`, including those to come."""
        at = after + 1
        while not self.is_dropped:
            if at < len(self.events):
                count, piece = join_events(self.events, at)
                at += count
                yield piece
            elif self._is_over:
                return
            else:
                await self._changed.wait()
        raise make_no_events_error()


class BackgroundResponse:
    """A running response; with `stream` its events are logged."""

    def __init__(self, tenant: str, answer: ResponseAnswer) -> None:
        self.tenant, self.answer = tenant, answer
        self.log = EventLog() if answer.body.stream else None
        self.task: asyncio.Task[None] | None = None

    def as_json(self) -> dict[str, Any]:
        return self.answer.format("queued" if self.answer.generation.times.first_s is None else "in_progress", [])


class Background:
    def __init__(self, store: ResponseStore, max_running: int = MAX_RUNNING, max_log_bytes: int = MAX_BYTES) -> None:
        """Share `store`; `max_log_bytes` bounds a tenant's event logs while its responses run."""
        self._store, self._max_running, self._max_log_bytes = store, max_running, max_log_bytes
        self._running: dict[str, BackgroundResponse] = {}
        self._num_log_bytes: Counter[str] = Counter()

    def check_limit(self, tenant: str) -> None:
        num_own = sum(one.tenant == tenant for one in self._running.values())
        if num_own >= self._max_running:
            raise Busy(
                f"{num_own} of your background responses are running: the limit is {self._max_running}; wait "
                "for one, or cancel one",
                RETRY_S,
            )

    def start(self, tenant: str, answer: ResponseAnswer, items: bytes) -> BackgroundResponse:
        try:
            self.check_limit(tenant)
        except Busy:
            answer.generation.close()
            raise
        running = BackgroundResponse(tenant, answer)
        self._store.put(tenant, running.as_json(), items)  # so that its items can be listed
        if running.log is not None:
            self._log_events(running, running.log, answer.encode_queued())
        self._running[answer.id] = running
        running.task = asyncio.ensure_future(self._run(running, items))
        running.task.add_done_callback(lambda task: self._finish(running, task.cancelled(), items))
        return running

    def find(self, tenant: str, id: str) -> BackgroundResponse | None:
        running = self._running.get(id)
        return running if running is not None and running.tenant == tenant else None

    async def cancel(self, running: BackgroundResponse) -> None:
        """Cancel and wait for the end."""
        assert running.task is not None
        running.task.cancel()
        await asyncio.wait([running.task])

    async def _run(self, running: BackgroundResponse, items: bytes) -> None:
        answer = running.answer
        try:
            if running.log is None:
                await answer.collect()
            else:
                async with contextlib.aclosing(answer.events()) as chunks:
                    async for chunk in chunks:
                        self._log_events(running, running.log, chunk)
        except Exception as error:
            known = to_api_error(error)
            if running.log is not None:
                self._log_events(running, running.log, answer.encode_failure(known))
            self._store.put(running.tenant, answer.format_failure(known), items)

    def _log_events(self, running: BackgroundResponse, log: EventLog, chunk: bytes) -> None:
        if log.is_dropped:
            return
        self._num_log_bytes[running.tenant] += len(chunk)
        if self._num_log_bytes[running.tenant] <= self._max_log_bytes:
            log.add(chunk)
        else:
            self._num_log_bytes[running.tenant] -= len(chunk) + sum(map(len, log.events))
            log.drop()

    def _finish(self, running: BackgroundResponse, is_cancelled: bool, items: bytes) -> None:
        running.answer.generation.close()  # the task may be cancelled before it starts
        if is_cancelled:
            self._store.put(running.tenant, running.answer.format_partial("cancelled"), items)
        del self._running[running.answer.id]
        if running.log is not None:
            self._num_log_bytes[running.tenant] -= sum(map(len, running.log.events))
            self._store.put_events(running.tenant, running.answer.id, running.log.events)
            running.log.end()


def join_events(events: Sequence[bytes], start: int) -> tuple[int, bytes]:
    """Join events from `begin` on into one piece; return their number, at least one, and the piece."""
    num_bytes, end = 0, start
    while end < len(events) and (end == start or num_bytes + len(events[end]) <= PIECE_BYTES):
        num_bytes += len(events[end])
        end += 1
    return end - start, b"".join(events[start:end])


def make_no_events_error() -> ApiError:
    return ApiError(
        400,
        "the events of this response are not kept: only background=true with stream=true keeps them, "
        "up to a size limit; fetch the response without stream",
        param="stream",
        code="events_not_kept",
    )
