"""Segments: files of records, each a block's name, its bytes and a checksum over both. They are only appended to."""

from __future__ import annotations

import hashlib
import os
import struct
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.cache.store import DIGEST_BYTES

NAME_BYTES = DIGEST_BYTES + 2
CHECKSUM_BYTES = 16
HEADER = struct.Struct(f"<4s{NAME_BYTES}sQ{CHECKSUM_BYTES}s")
MAGIC = b"PKV1"
SUFFIX = ".kv"


@dataclass(frozen=True, slots=True)
class Record:
    """Where a block's bytes lie in a segment."""

    path: Path
    start: int
    length: int
    checksum: bytes


def checksum(name: bytes, data: bytes | memoryview) -> bytes:
    made = hashlib.blake2b(name, digest_size=CHECKSUM_BYTES)
    made.update(data)
    return made.digest()


def read_record(name: bytes, record: Record) -> bytes | None:
    """Return the bytes of a record; None if they are gone, cut off or damaged."""
    try:
        with record.path.open("rb", buffering=0) as file:
            file.seek(record.start)
            data = file.read(record.length)
    except OSError:
        return None
    return data if len(data) == record.length and checksum(name, data) == record.checksum else None


def scan_records(path: Path, start: int, size: int) -> Iterator[tuple[bytes, Record]]:
    """Yield the whole records from a byte on; the last of a process that died, or writes now, may be cut off."""
    with path.open("rb", buffering=0) as file:
        while start + HEADER.size <= size:
            file.seek(start)
            header = file.read(HEADER.size)
            if len(header) < HEADER.size:
                return
            magic, name, length, found = HEADER.unpack(header)
            begin = start + HEADER.size
            if magic != MAGIC or begin + length > size:
                return
            yield name, Record(path, begin, length, found)
            start = begin + length


class SegmentWriter:
    """One file that this process alone appends to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{uuid.uuid4().hex}{SUFFIX}"
        self._file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self.size = 0

    @property
    def is_gone(self) -> bool:
        """True if somebody has removed the file."""
        return os.fstat(self._file).st_nlink == 0

    def append(self, name: bytes, data: bytes | memoryview) -> Record:
        """Write a record; what an error leaves of it is cut off."""
        made = checksum(name, data)
        parts = [HEADER.pack(MAGIC, name, len(data), made), data]
        try:
            self._write(parts)
        except OSError:
            os.ftruncate(self._file, self.size)
            os.lseek(self._file, self.size, os.SEEK_SET)
            raise
        record = Record(self.path, self.size + HEADER.size, len(data), made)
        self.size = record.start + record.length
        return record

    def _write(self, parts: list[bytes | memoryview]) -> None:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(self._file, rest) :]

    def close(self) -> None:
        os.close(self._file)
