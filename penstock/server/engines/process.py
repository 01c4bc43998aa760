"""One engine process, its two sockets and the private folder they are in."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import itertools
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from penstock.engine.messages import BlockTransfer, Command, Report, Stop
from penstock.errors import InvalidConfig
from penstock.host.gpus import EnginePlace, deal_gpus, list_gpus
from penstock.host.machine import python_command
from penstock.server.config import BOTH
from penstock.server.connections.body_memory import run_without_gc
from penstock.server.handover.roles import check_store

FOLDER = "penstock-sockets-"
MAX_SOCKET_PATH = 107  # bytes of sockaddr_un.sun_path without the null
LONGEST_NAME = "/" + FOLDER + "12345678" + "/999999.engine"
WORKER = python_command("penstock.api.worker")
STOP_S = 5.0
_serial_numbers = itertools.count(1)
DRAIN_MS = 20  # for reports left after its death
MAX_LOOP_BYTES = 256 * 1024  # of a report decoded on the event loop
MAX_TURN_BYTES = 128 * 1024  # of reports, after which the next is not handled with them
YIELD_BYTES = 16 * 1024  # after more, yield to the event loop


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder for sockets until the block ends; folders of killed servers are removed first."""
    folder, handle = _make()
    try:
        yield folder
    finally:
        _remove(folder, os.getpid())
        os.close(handle)


def _make() -> tuple[Path, int]:
    """Return the folder and a descriptor that holds its lock."""
    tried = []
    for place in _list_places():
        if len(os.fsencode(place + LONGEST_NAME)) > MAX_SOCKET_PATH:
            tried.append(f"{place} is too long")
            continue
        _remove_leftovers(place)
        folder = Path(place, FOLDER + secrets.token_hex(4))
        atexit.register(_remove, folder, os.getpid())  # before it exists: SIGTERM may raise SystemExit at any line
        try:
            folder.mkdir(mode=0o700)
            return folder, _lock(folder)
        except OSError as error:
            tried.append(f"{place}: {error.strerror}")
    raise InvalidConfig(
        f"cannot create a folder for sockets ({'; '.join(tried)}): set TMPDIR to a writable folder "
        f"whose path has at most {MAX_SOCKET_PATH - len(LONGEST_NAME)} bytes"
    )


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not a forked child
        shutil.rmtree(folder, ignore_errors=True)


def _list_places() -> list[str]:
    """List folders to try, best first; tempfile would write a file to choose."""
    named = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP", "XDG_RUNTIME_DIR")]
    return list(dict.fromkeys(os.path.abspath(place) for place in (*named, "/tmp", "/var/tmp", "/dev/shm") if place))


def _lock(folder: Path) -> int:
    """Lock a new folder; if another server removed it as a leftover before the lock, make it again."""
    while True:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # no locks on this filesystem: no other process can remove it either
            fcntl.flock(handle, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(folder)):
                return handle
        os.close(handle)
        folder.mkdir(mode=0o700)


def _remove_leftovers(place: str) -> None:
    for folder in Path(place).glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(handle).st_uid == os.geteuid():
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


@dataclass(frozen=True)
class Launch:
    """The start of an engine process, one of `num_replicas` that share the machine. `folder` is private to this user
    and holds the sockets."""

    model: str
    options: dict[str, Any]
    folder: Path
    num_replicas: int = 1
    command: Sequence[str] = WORKER
    roles: Sequence[str] = ()  # of the replicas: prefill, decode or both; empty: all do both
    transfer: BlockTransfer | None = None  # of blocks, where other servers have the other role

    def __post_init__(self) -> None:
        if self.transfer is not None:
            check_store(self.roles[0], self.options, self.transfer.port)
        elif self.roles and not self.options.get("kv_offloading_path"):
            raise InvalidConfig(
                "role hands prompts over through a store that engines share: set kv_offloading_path, to a folder in "
                "/dev/shm for one in memory"
            )
        if self.roles and self.options.get("enable_prefix_caching") is False:
            raise InvalidConfig(
                "role hands prompts over by their cache blocks, but enable_prefix_caching=False: leave one of them out"
            )

    def find_place(self, number: int) -> EnginePlace:
        """Return an engine's place among the GPUs; an engine for CPUs needs none."""
        gpus = [] if self.options.get("device") == "cpu" else list_gpus(os.environ)
        return deal_gpus(number, self.num_replicas, gpus, os.environ)

    def find_role(self, number: int) -> str:
        return self.roles[number] if self.roles else BOTH

    def find_transfer(self, number: int) -> BlockTransfer | None:
        """Return a replica's part in handing prompts over: each has a port of its own."""
        if self.transfer is None or not self.transfer.port:
            return self.transfer
        return msgspec.structs.replace(self.transfer, port=self.transfer.port + number)


class EngineProcess:
    """A started process; `watch` passes its reports on until it dies."""

    def __init__(
        self, process: asyncio.subprocess.Process, sockets: list[zmq.asyncio.Socket], paths: list[Path]
    ) -> None:
        self._process = process
        self._sockets = sockets
        self._paths = paths
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Report)

    @classmethod
    async def start(cls, launch: Launch, number: int = 0) -> EngineProcess:
        """Start the process of a replica, by its number."""
        folder, place = launch.folder, launch.find_place(number)
        serial = next(_serial_numbers)
        paths = [folder / f"{serial}.engine", folder / f"{serial}.beat"]
        sockets: list[zmq.asyncio.Socket] = []
        try:
            for path in paths:
                sockets.append(_bind(path))
            process = await asyncio.create_subprocess_exec(
                *launch.command, stdin=asyncio.subprocess.PIPE, start_new_session=True, env={**os.environ, **place.env}
            )
        except BaseException:
            _close(sockets, paths)
            raise
        task = {
            "model": launch.model,
            "options": launch.options,
            "endpoint": f"ipc://{paths[0]}",
            "beat_endpoint": f"ipc://{paths[1]}",
            "num_replicas": place.sharers.machine,
            "num_on_gpu": place.sharers.gpu,
            "transfer": launch.find_transfer(number),
        }
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it died already, which `watch` reports
            process.stdin.write(msgspec.json.encode(task) + b"\n")
            await process.stdin.drain()
        return cls(process, sockets, paths)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status; None while it lives, negative for a signal."""
        return self._process.returncode

    def send(self, command: Command) -> None:
        self._sockets[0].send(self._encoder.encode(command))

    async def watch(self, take: Callable[[Report], None], end_turn: Callable[[], None]) -> None:
        """Pass on its reports until it dies; `end_turn` is called after those that had come together."""
        readers = [asyncio.ensure_future(self._read(socket, take, end_turn)) for socket in self._sockets]
        try:
            dead = asyncio.ensure_future(self._process.wait())
            await asyncio.wait([dead, *readers], return_when=asyncio.FIRST_COMPLETED)
            for reader in readers:
                if reader.done():
                    reader.result()  # raise errors of `take`
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        for socket in self._sockets:
            while await socket.poll(DRAIN_MS):
                take(await self._decode(await socket.recv()))
        end_turn()

    async def _read(
        self, socket: zmq.asyncio.Socket, take: Callable[[Report], None], end_turn: Callable[[], None]
    ) -> None:
        while True:
            raw = await socket.recv()
            num_bytes = len(raw)
            try:
                take(await self._decode(raw))
                while num_bytes < MAX_TURN_BYTES and int(socket.get(zmq.EVENTS)) & zmq.POLLIN:
                    raw = await socket.recv()
                    num_bytes += len(raw)
                    take(await self._decode(raw))
            finally:
                end_turn()
            if num_bytes > YIELD_BYTES:
                await asyncio.sleep(0)  # the next may already be queued

    async def _decode(self, raw: bytes) -> Report:
        """Decode a report, off the event loop if it is large."""
        report: Report
        if len(raw) <= MAX_LOOP_BYTES:
            report = self._decoder.decode(raw)
        else:
            report = await asyncio.to_thread(run_without_gc, partial(self._decoder.decode, raw))
        return report

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Ask it to stop; kill it if it does not."""
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
