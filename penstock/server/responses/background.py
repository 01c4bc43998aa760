"""Responses that are made while nobody waits: polled, followed, cancelled by whoever comes back for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from penstock.errors import Busy
from penstock.server import sse
from penstock.server.errors import ApiError, as_api_error
from penstock.server.responses.answer import ResponseAnswer
from penstock.server.responses.store import MOST_BYTES, ResponseStore

MAX_RUNNING = 64  # of a tenant
RETRY_S = 5
PIECE_BYTES = 1 << 16  # of a log, that a follower is sent at once


class EventLog:
    """A response's events so far; the place of each is its sequence number."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.is_dropped = False  # there was no room for more
        self._is_over = False
        self._changed = asyncio.Event()

    def add(self, chunk: bytes) -> None:
        self.events += [event + sse.END for event in chunk.split(sse.END) if event]
        self._tell()

    def drop(self) -> None:
        self.events, self.is_dropped = [], True
        self._tell()

    def end(self) -> None:
        self._is_over = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """All events behind that number, those to come too."""
        at = after + 1
        while not self.is_dropped:
            if at < len(self.events):
                count, piece = join_some(self.events, at)
                at += count
                yield piece
            elif self._is_over:
                return
            else:
                await self._changed.wait()
        raise no_events()


class Running:
    """A response in the making. Its log is kept if it was asked for as a stream."""

    def __init__(self, tenant: str, answer: ResponseAnswer) -> None:
        self.tenant, self.answer = tenant, answer
        self.log = EventLog() if answer.body.stream else None
        self.task: asyncio.Task[None] | None = None

    def as_json(self) -> dict[str, Any]:
        """As it is now."""
        return self.answer.so_far("queued" if self.answer.generation.times.first_s is None else "in_progress")


class Background:
    def __init__(self, store: ResponseStore, max_running: int = MAX_RUNNING, max_log_bytes: int = MOST_BYTES) -> None:
        """`max_log_bytes` is for the events of one tenant's responses while they are made."""
        self._store, self._max_running, self._max_log_bytes = store, max_running, max_log_bytes
        self._running: dict[str, Running] = {}
        self._num_log_bytes: Counter[str] = Counter()

    def check_room(self, tenant: str) -> None:
        own = sum(one.tenant == tenant for one in self._running.values())
        if own >= self._max_running:
            raise Busy(
                f"{own} of your responses are made in the background: the limit is {self._max_running}; wait "
                "for one, or cancel one",
                RETRY_S,
            )

    def begin(self, tenant: str, answer: ResponseAnswer, items: bytes) -> Running:
        try:
            self.check_room(tenant)
        except Busy:
            answer.generation.close()
            raise
        running = Running(tenant, answer)
        self._store.keep(tenant, running.as_json(), items)  # so that its items are found
        if running.log is not None:
            self._note(running, running.log, answer.queued())
        self._running[answer.id] = running
        running.task = asyncio.ensure_future(self._run(running, items))
        running.task.add_done_callback(lambda task: self._end(running, task.cancelled(), items))
        return running

    def find(self, tenant: str, id: str) -> Running | None:
        running = self._running.get(id)
        return running if running is not None and running.tenant == tenant else None

    async def cancel(self, running: Running) -> None:
        """End it, and wait for that."""
        assert running.task is not None
        running.task.cancel()
        await asyncio.wait([running.task])

    async def _run(self, running: Running, items: bytes) -> None:
        answer = running.answer
        try:
            if running.log is None:
                await answer.whole()
            else:
                async with contextlib.aclosing(answer.events()) as chunks:
                    async for chunk in chunks:
                        self._note(running, running.log, chunk)
        except Exception as error:
            known = as_api_error(error)
            if running.log is not None:
                self._note(running, running.log, answer.failed(known))
            self._store.keep(running.tenant, answer.failure(known), items)

    def _note(self, running: Running, log: EventLog, chunk: bytes) -> None:
        if log.is_dropped:
            return
        self._num_log_bytes[running.tenant] += len(chunk)
        if self._num_log_bytes[running.tenant] <= self._max_log_bytes:
            log.add(chunk)
        else:
            self._num_log_bytes[running.tenant] -= len(chunk) + sum(map(len, log.events))
            log.drop()

    def _end(self, running: Running, is_cancelled: bool, items: bytes) -> None:
        running.answer.generation.close()  # also where the task was cancelled before it began
        if is_cancelled:
            self._store.keep(running.tenant, running.answer.cancelled(), items)
        del self._running[running.answer.id]
        if running.log is not None:
            self._num_log_bytes[running.tenant] -= sum(map(len, running.log.events))
            self._store.keep_events(running.tenant, running.answer.id, running.log.events)
            running.log.end()


def join_some(events: Sequence[bytes], begin: int) -> tuple[int, bytes]:
    """The number of events from `begin` on that fill a piece, one at least, and the piece: many may follow one log."""
    num_bytes, end = 0, begin
    while end < len(events) and (end == begin or num_bytes + len(events[end]) <= PIECE_BYTES):
        num_bytes += len(events[end])
        end += 1
    return end - begin, b"".join(events[begin:end])


def no_events() -> ApiError:
    return ApiError(
        400,
        "the events of this response are not kept: only those of one made with background=true and "
        "stream=true are, while there is room; ask for the response itself, without stream",
        param="stream",
        code="events_not_kept",
    )
