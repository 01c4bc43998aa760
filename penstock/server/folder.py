"""The folder of the engines' sockets: private to this user, locked as long as its server lives, and cleared after it.

The lock is seen by every server that sees the folder, also from another container; a process id is not.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import InvalidConfig

FOLDER = "penstock-sockets-"
MAX_SOCKET_PATH = 107  # bytes: sun_path of sockaddr_un, less its null
LONGEST_NAME = "/" + FOLDER + "12345678" + "/999999.engine"


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder for the lines to the engines, until the block ends. What killed servers left is cleared first."""
    folder, handle = _make()
    try:
        yield folder
    finally:
        _remove(folder, os.getpid())
        os.close(handle)


def _make() -> tuple[Path, int]:
    """The folder and a handle that holds its lock."""
    tried = []
    for place in _places():
        if len(os.fsencode(place + LONGEST_NAME)) > MAX_SOCKET_PATH:
            tried.append(f"{place} is too long")
            continue
        _clear_left(place)
        folder = Path(place, FOLDER + secrets.token_hex(4))
        atexit.register(_remove, folder, os.getpid())  # before it is there: a signal may come at any line
        try:
            folder.mkdir(mode=0o700)
            return folder, _lock(folder)
        except OSError as error:
            tried.append(f"{place}: {error.strerror}")
    raise InvalidConfig(
        f"the engines' sockets have no place ({'; '.join(tried)}): set TMPDIR to a writable folder "
        f"whose path has at most {MAX_SOCKET_PATH - len(LONGEST_NAME)} bytes"
    )


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not a fork of it
        shutil.rmtree(folder, ignore_errors=True)


def _places() -> list[str]:
    """Folders to try, best first. tempfile's own choice would be made by writing a file."""
    named = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP", "XDG_RUNTIME_DIR")]
    return list(dict.fromkeys(os.path.abspath(place) for place in (*named, "/tmp", "/var/tmp", "/dev/shm") if place))


def _lock(folder: Path) -> int:
    """Lock a new folder. One that a starting server took for left over, before it was locked, is made again."""
    while True:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a filesystem without locks: nobody can clear it, either
            fcntl.flock(handle, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(folder)):
                return handle
        os.close(handle)
        folder.mkdir(mode=0o700)


def _clear_left(place: str) -> None:
    for folder in Path(place).glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(handle).st_uid == os.geteuid():
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
