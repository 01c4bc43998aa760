"""A wheel on disk: what it is, what it lists, and its files checked against its own RECORD."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import BinaryIO

from penstock.errors import DownloadFailed

_CHUNK = 1 << 20
_HASHES = ("sha256", "sha384", "sha512")
_MAX_TEXT_BYTES = 32 << 20


@dataclass(frozen=True)
class Entry:
    """A line of the RECORD."""

    algorithm: str
    digest: str
    num_bytes: int | None


class Wheel:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, ValueError) as error:
            raise self._damaged(str(error)) from error
        self.files = [name for name in self._zip.namelist() if not name.endswith("/")]
        for name in self.files:
            if not is_safe(name):
                raise DownloadFailed(
                    f"{path.name} holds the unsafe path {name!r}; nothing was taken from it: do not trust this package"
                )
        self._entries = self._read_record()
        headers = HeaderParser().parsestr(self.text(self._info("METADATA")))
        self.requires: list[str] = headers.get_all("Requires-Dist") or []

    def size(self, name: str) -> int:
        return self._zip.getinfo(name).file_size

    def text(self, name: str) -> str:
        """A small file, checked like every other."""
        if self.size(name) > _MAX_TEXT_BYTES:
            raise self._damaged(f"{name} is too large")
        buffer = io.BytesIO()
        self.copy(name, buffer)
        return buffer.getvalue().decode("utf-8", "replace")

    def copy(self, name: str, target: BinaryIO, observe: Callable[[bytes], object] = len) -> None:
        """Write one file to `target`; whoever reads `target` must wait until this returns."""
        entry = self._entries.get(name)
        if entry is None:
            raise DownloadFailed(
                f"{self.path.name} does not list {name} with a sha256 in its RECORD; the package is "
                "broken: try another version"
            )
        digest, num_bytes = hashlib.new(entry.algorithm), 0
        try:
            with self._zip.open(name) as source:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    observe(chunk)
                    target.write(chunk)
                    num_bytes += len(chunk)
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
            raise self._damaged(str(error)) from error
        found = base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")
        if found != entry.digest or entry.num_bytes not in (None, num_bytes):
            raise DownloadFailed(
                f"wrong checksum: {name} in {self.path.name} has {entry.algorithm} {found}, its "
                f"RECORD says {entry.digest}; nothing was kept: try again"
            )

    def close(self) -> None:
        self._zip.close()

    def _info(self, file: str) -> str:
        names = [name for name in self.files if name.count("/") == 1 and name.endswith(f".dist-info/{file}")]
        if len(names) != 1:
            raise self._damaged(f"it has {len(names)} {file} files")
        return names[0]

    def _read_record(self) -> dict[str, Entry]:
        name = self._info("RECORD")
        if self.size(name) > _MAX_TEXT_BYTES:
            raise self._damaged("its RECORD is too large")
        entries = {}
        try:
            rows = csv.reader(io.StringIO(self._zip.read(name).decode("utf-8")))
            for path, algorithm_and_digest, num_bytes, *_ in rows:
                algorithm, _, digest = algorithm_and_digest.partition("=")
                if algorithm in _HASHES and digest:
                    entries[path] = Entry(algorithm, digest.rstrip("="), int(num_bytes) if num_bytes else None)
        except (zipfile.BadZipFile, UnicodeDecodeError, ValueError, csv.Error) as error:
            raise self._damaged(f"its RECORD cannot be read: {error}") from error
        return entries

    def _damaged(self, reason: str) -> DownloadFailed:
        return DownloadFailed(f"{self.path.name} is damaged: {reason}; try again")


def is_safe(name: str) -> bool:
    """Whether a path inside an archive stays inside the folder it is unpacked to."""
    parts = name.split("/")
    return not (name.startswith("/") or "\\" in name or ":" in parts[0] or "\0" in name or ".." in parts)
