"""Read small files named by users: regular files of bounded size, and nothing that blocks or never ends."""

from __future__ import annotations

import errno
import os
import stat

from penstock.errors import PenstockError, quote

MIB = 1 << 20
CHUNK_BYTES = MIB
KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


class UnreadableFile(PenstockError, OSError):
    """A file that is missing, too large or not regular; the message has its path, `reason` does not."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(f"cannot read {quote(os.fspath(path))}: {reason}")
        self.reason = reason


def read_regular(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes`, following links; otherwise raise UnreadableFile at once, without
    blocking on pipes or devices."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            _check(path, os.fstat(handle), max_bytes)
            return _read(path, handle, max_bytes)
        finally:
            os.close(handle)
    except UnreadableFile:
        raise
    except OSError as error:
        raise UnreadableFile(path, error.strerror or str(error)) from None
    except ValueError:
        raise UnreadableFile(path, "its name has a null byte") from None


def _check(path: str | os.PathLike[str], status: os.stat_result, max_bytes: int) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise UnreadableFile(
            path,
            os.strerror(errno.EISDIR)
            if kind == stat.S_IFDIR
            else f"it is {KINDS.get(kind, 'a device')}, not a regular file",
        )
    if status.st_size > max_bytes:
        raise _too_large(path, max_bytes)


def _read(path: str | os.PathLike[str], handle: int, max_bytes: int) -> bytes:
    """Read without relying on the size: files of /proc have none, and others grow."""
    parts, left = [], max_bytes + 1
    while left > 0 and (part := os.read(handle, min(left, CHUNK_BYTES))):
        parts.append(part)
        left -= len(part)
    if left <= 0:
        raise _too_large(path, max_bytes)
    return b"".join(parts)


def _too_large(path: str | os.PathLike[str], max_bytes: int) -> UnreadableFile:
    limit = f"{max_bytes / MIB:g} MiB" if max_bytes >= MIB else f"{max_bytes} bytes"
    return UnreadableFile(path, f"it is larger than {limit}")
