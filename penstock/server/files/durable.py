"""Small records on disk that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

RECORD = ".json"
DATA = ".data"
UNFINISHED = ".part"
MAX_RECORD_BYTES = 1 << 20

Kind = TypeVar("Kind")


def write_record(path: Path, value: Any) -> None:
    """Replace the record at once, after its bytes have reached the disk."""
    temporary = path.with_suffix(UNFINISHED)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(value))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_records(folder: Path, kind: type[Kind]) -> Iterator[Kind]:
    """All that can be read; one that is damaged is passed over."""
    for path in sorted(folder.glob(f"*{RECORD}")):
        with contextlib.suppress(OSError, msgspec.MsgspecError), open(path, "rb") as file:
            yield msgspec.json.decode(file.read(MAX_RECORD_BYTES), type=kind)


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
