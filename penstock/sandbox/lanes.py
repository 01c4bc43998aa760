"""Lanes for a caller with an event loop: nothing here blocks it."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from penstock.sandbox import frames
from penstock.sandbox.process import Sandbox
from penstock.sandbox.slots import Slots

PART_BYTES = 1 << 18


class Lane:
    """One sandboxed process. Whatever disturbs a call ends it."""

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
        """Send a job and wait for its reply's body. Raises TimeoutError, or OSError where the process ended."""
        try:
            return await asyncio.wait_for(self._exchange(data), within_s)
        except asyncio.TimeoutError:
            self.end()
            raise TimeoutError from None  # its own class before Python 3.11
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
    """A few lanes that jobs share, each job in the first that is free."""

    def __init__(
        self, sandbox: Sandbox, count: int, more_bytes: int, niceness: int, within_s: float, max_waiting: int
    ) -> None:
        self._sandbox, self._more_bytes, self._niceness, self._within_s = sandbox, more_bytes, niceness, within_s
        self._slots = Slots(count, max_waiting, "texts to encode")
        self._idle: list[Lane] = []

    async def call(self, data: bytearray, tenant: str) -> bytes:
        async with self._slots.turn(tenant):
            while self._idle:
                with contextlib.suppress(ConnectionError):  # it may have died while it was idle
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
