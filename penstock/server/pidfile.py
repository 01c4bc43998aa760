"""Pid files of running servers: one each under PENSTOCK_HOME/run, locked while its process lives.

The lock ends with the process, so a file that can be locked belongs to a dead server.
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

_open_files: list[IO[str]] = []  # open until the process ends: the lock signals its end


@dataclass(frozen=True)
class ServerRecord:
    pid: int
    url: str
    models: list[str]
    started_s: float  # by time.time()


class RunningServer:
    """An open pid file: it tells when the process ends, even if the file is gone."""

    def __init__(self, record: ServerRecord, file: IO[str]) -> None:
        self.record = record
        self._file = file

    def __del__(self) -> None:
        self._file.close()

    @property
    def alive(self) -> bool:
        return not _can_lock(self._file)


def pid_folder() -> Path:
    return home() / "run"


@contextlib.contextmanager
def write_pidfile(url: str, models: Sequence[str]) -> Iterator[None]:
    """Announce this server until the block ends; a failure is only logged."""
    record = ServerRecord(os.getpid(), url, list(models), time.time())
    path = pid_folder() / f"{record.pid}.json"
    try:
        _write(record, path)
    except OSError as error:
        log.warning("cannot write %s (%s): penstock ps will not show this server", path, error.strerror)
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
    _open_files.append(file)


def list_servers() -> list[RunningServer]:
    """List the running servers, oldest first; files of dead ones are removed."""
    found = []
    for path in sorted(pid_folder().glob("*.json")) if pid_folder().is_dir() else []:
        with contextlib.suppress(OSError, ValueError, TypeError), contextlib.ExitStack() as stack:
            file = stack.enter_context(open(path, encoding="utf-8"))
            if _can_lock(file):
                path.unlink(missing_ok=True)
            else:
                found.append(RunningServer(ServerRecord(**json.load(file)), file))
                stack.pop_all()  # RunningServer closes it
    return sorted(found, key=lambda server: server.record.started_s)


def _can_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True
