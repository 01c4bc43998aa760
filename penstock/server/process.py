"""One engine process and the two lines to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from penstock.engine.messages import Command, Report, Stop
from penstock.machine import python_command
from penstock.server.room import undisturbed

WORKER = python_command("penstock.worker")
STOP_S = 5.0
_numbers = itertools.count(1)
LAST_WORDS_MS = 20  # after its death, for what is still in the line
MAX_LOOP_BYTES = 256 * 1024  # of a report that is decoded on the loop
MAX_UNBROKEN_BYTES = 16 * 1024  # of one after which others come first


class EngineProcess:
    """Made and started at once; `watch` hands on what it reports until it dies."""

    def __init__(
        self, process: asyncio.subprocess.Process, sockets: list[zmq.asyncio.Socket], paths: list[Path]
    ) -> None:
        self._process = process
        self._sockets = sockets
        self._paths = paths
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Report)

    @classmethod
    async def start(
        cls, model: str, options: Mapping[str, Any], folder: Path, command: Sequence[str] = WORKER
    ) -> EngineProcess:
        """`folder` is private to this user and holds the lines' sockets."""
        number = next(_numbers)
        paths = [folder / f"{number}.engine", folder / f"{number}.beat"]
        sockets: list[zmq.asyncio.Socket] = []
        try:
            for path in paths:
                sockets.append(_bind(path))
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, start_new_session=True
            )
        except BaseException:
            _close(sockets, paths)
            raise
        task = {
            "model": model,
            "options": dict(options),
            "endpoint": f"ipc://{paths[0]}",
            "beat_endpoint": f"ipc://{paths[1]}",
        }
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it died already: `watch` tells
            process.stdin.write(msgspec.json.encode(task) + b"\n")
            await process.stdin.drain()
        return cls(process, sockets, paths)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """None while it lives; minus the signal that killed it."""
        return self._process.returncode

    def send(self, command: Command) -> None:
        self._sockets[0].send(self._encoder.encode(command))

    async def watch(self, take: Callable[[Report], None]) -> None:
        readers = [asyncio.ensure_future(self._read(socket, take)) for socket in self._sockets]
        try:
            dead = asyncio.ensure_future(self._process.wait())
            await asyncio.wait([dead, *readers], return_when=asyncio.FIRST_COMPLETED)
            for reader in readers:
                if reader.done():
                    reader.result()  # a report that cannot be taken is our own fault
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        for socket in self._sockets:
            while await socket.poll(LAST_WORDS_MS):
                take(await self._decoded(await socket.recv()))

    async def _read(self, socket: zmq.asyncio.Socket, take: Callable[[Report], None]) -> None:
        while True:
            raw = await socket.recv()
            take(await self._decoded(raw))
            if len(raw) > MAX_UNBROKEN_BYTES:
                await asyncio.sleep(0)  # the next may be there already

    async def _decoded(self, raw: bytes) -> Report:
        """A large one is decoded off the loop; the next is read after it."""
        report: Report
        if len(raw) <= MAX_LOOP_BYTES:
            report = self._decoder.decode(raw)
        else:
            report = await asyncio.to_thread(undisturbed, partial(self._decoder.decode, raw))
        return report

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Ask it to end; kill it when it does not."""
        if self._process.returncode is None:
            self.send(Stop())
            try:
                await asyncio.wait_for(self._process.wait(), STOP_S)
            except asyncio.TimeoutError:
                self.kill()
                await self._process.wait()

    def close(self) -> None:
        _close(self._sockets, self._paths)


def _bind(path: Path) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
    try:
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.LINGER, 0)
        socket.bind(f"ipc://{path}")
    except BaseException:
        socket.close()
        raise
    return socket


def _close(sockets: list[zmq.asyncio.Socket], paths: list[Path]) -> None:
    for socket in sockets:
        socket.close()
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
