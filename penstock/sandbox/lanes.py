"""Lanes for asyncio callers; nothing here blocks the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.errors import Busy
from penstock.sandbox import frames
from penstock.sandbox.process import Sandbox


class Slots:
    """`count` slots shared fairly among tenants."""

    def __init__(self, count: int, max_waiting: int, what: str) -> None:
        self._free = count
        self._max_waiting, self._what = max_waiting, what
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._num_waiting = 0

    @asynccontextmanager
    async def turn(self, tenant: str = "") -> AsyncIterator[None]:
        await self._acquire(tenant)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, tenant: str) -> None:
        if self._free and not self._num_waiting:
            self._free -= 1
            return
        if self._num_waiting >= self._max_waiting:
            raise Busy(f"{self._num_waiting} {self._what} are queued already: try again later", 5)
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(mine)
        self._num_waiting += 1
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._release()  # acquired after cancellation
            else:
                self._leave(tenant, mine)
            raise

    def _leave(self, tenant: str, mine: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant)
        if queue is not None and mine in queue:
            queue.remove(mine)
            self._taken_out(tenant, queue)

    def _release(self) -> None:
        """Hand the slot to the next waiter. A cancelled one may still be in the queue."""
        while self._waiting:
            tenant, queue = next(iter(self._waiting.items()))
            first = queue.popleft()
            self._waiting.move_to_end(tenant)
            self._taken_out(tenant, queue)
            if not first.done():
                return first.set_result(None)
        self._free += 1

    def _taken_out(self, tenant: str, queue: deque[asyncio.Future[None]]) -> None:
        self._num_waiting -= 1
        if not queue:
            del self._waiting[tenant]


PART_BYTES = 1 << 18


class Lane:
    """One sandboxed process. Any disturbance of a call ends it."""

    def __init__(
        self, sandbox: Sandbox, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._sandbox, self._number = sandbox, number
        self._reader, self._writer = reader, writer
        self.usable = True

    @classmethod
    async def begin(
        cls, sandbox: Sandbox, more_bytes: int, niceness: int = 0, cpu_s: float | None = None, grammars: bool = False
    ) -> Lane:
        forking = asyncio.ensure_future(asyncio.to_thread(sandbox.fork, more_bytes, niceness, cpu_s, grammars))
        try:
            number, sock = await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(lambda done: _abandon(sandbox, done))
            raise
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(sandbox, number, reader, writer)

    async def call(self, data: bytearray, within_s: float) -> bytes:
        """Send a job and wait for the reply's body. Raises TimeoutError, or OSError if the process ended."""
        try:
            return await asyncio.wait_for(self._exchange(data), within_s)
        except asyncio.TimeoutError:
            self.end()
            raise TimeoutError from None  # a class of its own before Python 3.11
        except BaseException:
            self.end()
            raise

    async def _exchange(self, data: bytearray) -> bytes:
        for begin in range(0, len(data), PART_BYTES):  # a transport copies what it cannot send at once
            self._writer.write(data[begin : begin + PART_BYTES])
            await self._writer.drain()
        try:
            size, ends = frames.HEADER.unpack(await self._reader.readexactly(frames.HEADER.size))
            body = await self._reader.readexactly(size)
        except asyncio.IncompleteReadError:
            raise frames.Closed("the process has ended") from None
        if ends:
            self.end()
        return body

    def end(self) -> None:
        if self.usable:
            self.usable = False
            self._writer.close()
            self._sandbox.kill(self._number)


def _abandon(sandbox: Sandbox, forking: asyncio.Future[tuple[int, socket.socket]]) -> None:
    with contextlib.suppress(Exception):
        number, sock = forking.result()
        sock.close()
        sandbox.kill(number)


class Lanes:
    """A few lanes that jobs share; each job takes the first that is free."""

    def __init__(
        self, sandbox: Sandbox, count: int, more_bytes: int, niceness: int, within_s: float, max_waiting: int
    ) -> None:
        self._sandbox, self._more_bytes, self._niceness, self._within_s = sandbox, more_bytes, niceness, within_s
        self._slots = Slots(count, max_waiting, "texts to encode")
        self._idle: list[Lane] = []

    async def call(self, data: bytearray, tenant: str) -> bytes:
        async with self._slots.turn(tenant):
            while self._idle:
                with contextlib.suppress(ConnectionError):  # it may have died while idle
                    return await self._call(self._idle.pop(), data)
            return await self._call(await Lane.begin(self._sandbox, self._more_bytes, self._niceness), data)

    async def _call(self, lane: Lane, data: bytearray) -> bytes:
        try:
            return await lane.call(data, self._within_s)
        finally:
            if lane.usable:
                self._idle.append(lane)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end()
