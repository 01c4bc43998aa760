"""Which servers run on this machine: one file each under PENSTOCK_HOME/run, locked as long as its process lives.

The lock falls with the process, however that ends, so a file that can be locked is one that a dead server left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from penstock.hub import home

log = logging.getLogger("penstock.server")

_held: list[IO[str]] = []  # open to the end of the process: whoever waits for that waits for the lock


@dataclass(frozen=True)
class ServerRecord:
    pid: int
    url: str
    models: list[str]
    started_s: float  # by time.time()


class RunningServer:
    """A server's file, opened: it tells of the process's end even when the file has gone before."""

    def __init__(self, record: ServerRecord, file: IO[str]) -> None:
        self.record = record
        self._file = file

    @property
    def alive(self) -> bool:
        return not _lockable(self._file)


def folder() -> Path:
    return home() / "run"


@contextlib.contextmanager
def registered(url: str, models: Sequence[str]) -> Iterator[None]:
    """For as long as the server takes requests. A server that cannot be noted down serves nevertheless."""
    record = ServerRecord(os.getpid(), url, list(models), time.time())
    path = folder() / f"{record.pid}.json"
    try:
        _write(record, path)
    except OSError as error:
        log.warning("%s cannot be written (%s): penstock ps will not show this server", path, error.strerror)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _write(record: ServerRecord, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    file = os.fdopen(handle, "w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump(asdict(record), file)
        file.flush()
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _held.append(file)


def running_servers() -> list[RunningServer]:
    """Those that live, oldest first; what dead ones left is cleared."""
    found = []
    for path in sorted(folder().glob("*.json")) if folder().is_dir() else []:
        with contextlib.suppress(OSError, ValueError, TypeError):
            file = open(path, encoding="utf-8")  # noqa: SIM115 - kept by RunningServer
            if _lockable(file):
                path.unlink(missing_ok=True)
                file.close()
            else:
                found.append(RunningServer(ServerRecord(**json.load(file)), file))
    return sorted(found, key=lambda server: server.record.started_s)


def _lockable(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True
