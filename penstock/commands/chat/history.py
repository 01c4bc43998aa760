"""Messages typed in earlier chats: one JSON string a line, in a private file of bounded size."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path

from penstock.host.files import MIB

MAX_ENTRIES = 1000
MAX_ENTRY_CHARS = 1 << 16  # a longer message is not kept
MAX_FILE_BYTES = 4 * MIB  # what is read of a file, from its end
SLACK = 200  # entries over MAX_ENTRIES before the file is rewritten
PRIVATE = 0o600


def history_path() -> Path:
    from penstock.hub import home

    return home() / "chat_history.jsonl"


class HistoryFile:
    """Appends entries, and drops the oldest. A file that cannot be used is left alone: a chat works without."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> list[str]:
        """Return the entries, oldest first."""
        try:
            with self._open() as handle:
                entries = _parse(_read_end(handle.fileno()))
                if len(entries) > MAX_ENTRIES + SLACK or os.fstat(handle.fileno()).st_size > MAX_FILE_BYTES:
                    _rewrite(handle.fileno(), entries[-MAX_ENTRIES:])
        except OSError:
            return []
        return entries[-MAX_ENTRIES:]

    def append(self, entry: str) -> None:
        if len(entry) > MAX_ENTRY_CHARS:
            return
        with suppress(OSError), self._open() as handle:
            os.write(handle.fileno(), _line(entry))

    def _open(self) -> _Locked:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return _Locked(self._path)


class _Locked:
    """A private regular file, opened for reading and appending, and locked against other chats."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._number = os.open(path, flags, PRIVATE)

    def fileno(self) -> int:
        return self._number

    def __enter__(self) -> _Locked:
        try:
            os.fchmod(self._number, PRIVATE)
            fcntl.flock(self._number, fcntl.LOCK_EX)
        except OSError:
            os.close(self._number)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._number)


def _line(entry: str) -> bytes:
    return json.dumps(entry).encode() + b"\n"  # ASCII: surrogates are escaped too


def _read_end(number: int) -> bytes:
    size = os.fstat(number).st_size
    return os.pread(number, MAX_FILE_BYTES, max(0, size - MAX_FILE_BYTES))


def _parse(text: bytes) -> list[str]:
    entries = []
    for line in text.splitlines():
        with suppress(ValueError, RecursionError):
            if isinstance(entry := json.loads(line), str):
                entries.append(entry)
    return entries


def _rewrite(number: int, entries: list[str]) -> None:
    os.ftruncate(number, 0)
    os.write(number, b"".join(map(_line, entries)))
