"""The folder in which a server keeps files and batches: its own for as long as it runs, and there again after it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import InvalidConfig, shown
from penstock.hub import home

log = logging.getLogger("penstock.server")

FILES, BATCHES = "penstock-files", "penstock-batches"


@contextlib.contextmanager
def data_folder(given: str | None, port: int, fallback: Path) -> Iterator[Path]:
    """The folder that was given, or else one for this port under PENSTOCK_HOME, locked. Where that one cannot be had,
    and for port 0, which no later server has again, files lie under `fallback` and go with the server."""
    if given is not None:
        try:
            path, handle = Path(given).expanduser(), _open(Path(given).expanduser())
        except OSError as error:
            raise InvalidConfig(
                f"data_folder {shown(given)} cannot be used: {_reason(error)}; choose another with --data-folder"
            ) from None
    else:
        path, handle = _open_default(port, fallback)
    try:
        yield path
    finally:
        if given is None:
            _remove_empty(path)
        os.close(handle)


def _open_default(port: int, fallback: Path) -> tuple[Path, int]:
    path = home() / "data" / str(port)
    if port:
        try:
            return path, _open(path)
        except OSError as error:
            log.warning(
                "%s cannot be used (%s): files and batches go with this server; choose a folder with --data-folder",
                path,
                _reason(error),
            )
    return fallback / "data", _open(fallback / "data")


def _open(path: Path) -> int:
    """Make the folder, with parts private to this user, and lock it; the handle holds the lock."""
    for part in (FILES, BATCHES):
        (path / part).mkdir(mode=0o700, parents=True, exist_ok=True)
        (path / part).chmod(0o700)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        probe = path / FILES / "probe"
        probe.touch(mode=0o600)
        probe.unlink()
    except BaseException:
        os.close(handle)
        raise
    return handle


def _remove_empty(path: Path) -> None:
    with contextlib.suppress(OSError):  # there is something in it
        for part in (FILES, BATCHES):
            (path / part).rmdir()
        path.rmdir()


def _reason(error: OSError) -> str:
    return "another server uses it" if isinstance(error, BlockingIOError) else error.strerror or str(error)
