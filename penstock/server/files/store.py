"""The files of all tenants: an index in memory over records and data on disk, bounded in number and bytes."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import shown
from penstock.server.context import new_id
from penstock.server.errors import ApiError
from penstock.server.files.durable import DATA, RECORD, UNFINISHED, read_records, remove, write_record

DAY_S = 86400
MAX_AGE_S = 30 * DAY_S  # OpenAI's, for files of batches
MAX_FILES = 10_000
MAX_FILE_BYTES = 200 << 20  # OpenAI's, for a batch's input
ID = "file-"
_OURS = re.compile(rf"{ID}[0-9a-f]{{24}}\.\w+", re.ASCII)  # names on disk: nothing else is touched


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


def new_file_id() -> str:
    return new_id(ID)


class FileStore:
    """Where several tenants share it, none has more than half of the room. Its methods may be called from threads;
    those that say so wait for the disk."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        *,
        is_shared: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.max_bytes = max_bytes
        self.max_file_bytes = min(MAX_FILE_BYTES, max_bytes)
        self._folder, self._is_shared, self._clock = folder, is_shared, clock
        self._files: dict[str, StoredFile] = {}
        self._held: dict[str, int] = {}  # bytes by tenant, of what is being written too
        self._pins: Counter[str] = Counter()  # by id: batches that read it
        self._lock = threading.Lock()

    def load(self, unfinished: Collection[str] = ()) -> None:
        """Read what an earlier server left (waits for the disk). Data without a record is removed, but for the files
        that a batch was about to finish."""
        for file in read_records(self._folder, StoredFile):
            record = self._record_of(file.id)
            if _OURS.fullmatch(record.name) and record.is_file() and self.path_of(file.id).is_file():
                self._add(file)
                self.reserve(file.tenant, file.num_bytes, is_bounded=False)
        known = {*self._files, *unfinished}
        for path in self._folder.iterdir():
            if _OURS.fullmatch(path.name) and (path.suffix == UNFINISHED or path.stem not in known):
                remove(path)

    def path_of(self, id: str) -> Path:
        """The file with the data of an id that was made here."""
        return self._folder / (id + DATA)

    def _record_of(self, id: str) -> Path:
        return self._folder / (id + RECORD)

    def unfinished_path(self, id: str) -> Path:
        return self._folder / (id + UNFINISHED)

    # room

    def reserve(self, tenant: str, num_bytes: int, *, is_bounded: bool = True) -> None:
        """Take so many bytes more for a tenant; ApiError where there is no room for them."""
        with self._lock:
            most = self.max_bytes // 2 if self._is_shared() else self.max_bytes
            own, total = self._held.get(tenant, 0), sum(self._held.values())
            if is_bounded and num_bytes > 0 and (own + num_bytes > most or total + num_bytes > self.max_bytes):
                raise ApiError(
                    413,
                    f"there is no room for this file: your files have {own} bytes of at most {most}, "
                    f"and all files together {total} of {self.max_bytes}; delete some, or start the "
                    "server with a larger --max-files-mb",
                    code="storage_full",
                    headers={"Connection": "close"},
                )
            self._held[tenant] = own + num_bytes
            if not self._held[tenant]:
                del self._held[tenant]

    def release(self, tenant: str, num_bytes: int) -> None:
        self.reserve(tenant, -num_bytes)

    def check_number(self, tenant: str) -> None:
        """ApiError where the tenant has as many files as it may."""
        most = MAX_FILES // 2 if self._is_shared() else MAX_FILES
        with self._lock:
            own = sum(file.tenant == tenant for file in self._files.values())
        if own >= most or len(self._files) >= MAX_FILES:
            raise ApiError(
                413,
                f"there are {own} files of yours and {len(self._files)} in all: the limits are {most} "
                f"and {MAX_FILES}; delete some",
                code="storage_full",
            )

    # files

    def add(self, file: StoredFile) -> None:
        """Record a file whose data lies at its path and whose bytes are reserved (waits for the disk)."""
        write_record(self._record_of(file.id), file)
        self._add(file)

    def _add(self, file: StoredFile) -> None:
        with self._lock:
            self._files[file.id] = file

    def make(
        self, *, id: str, tenant: str, filename: str, purpose: str, num_bytes: int, lifetime_s: int = MAX_AGE_S
    ) -> StoredFile:
        now = int(self._clock())
        return StoredFile(
            id=id,
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            num_bytes=num_bytes,
            created_at=now,
            expires_at=now + lifetime_s,
        )

    def all_of(self, tenant: str) -> list[StoredFile]:
        """Oldest first."""
        with self._lock:
            files = list(self._files.values())
        now = self._clock()
        return sorted(
            (file for file in files if file.tenant == tenant and file.expires_at > now),
            key=lambda file: (file.created_at, file.id),
        )

    def has(self, id: str) -> bool:
        return id in self._files

    def find(self, tenant: str, id: str, param: str | None = None) -> StoredFile:
        file = self._files.get(id)
        if file is None or file.tenant != tenant or file.expires_at <= self._clock():
            raise ApiError(
                404,
                f"there is no file {shown(id)} here: it was deleted, has expired, or is another client's",
                param=param,
                code="file_not_found",
            )
        return file

    def pin(self, id: str, count: int = 1) -> None:
        """Keep a file, whatever becomes of it, until it is pinned by -1 as often."""
        with self._lock:
            self._pins[id] += count
            if not self._pins[id]:
                del self._pins[id]

    def delete(self, file: StoredFile) -> None:
        """Forget a file (waits for the disk); the record goes first, so that no half of it comes back."""
        with self._lock:
            if file.id in self._pins:
                raise ApiError(
                    409,
                    f"a batch that has not ended reads {file.id}: cancel it first, or wait for it",
                    code="file_in_use",
                )
            if self._files.pop(file.id, None) is None:
                return
        remove(self._record_of(file.id))
        remove(self.path_of(file.id))
        self.release(file.tenant, file.num_bytes)

    def delete_expired(self) -> None:
        """Waits for the disk."""
        with self._lock:
            expired = [
                file for file in self._files.values() if file.expires_at <= self._clock() and file.id not in self._pins
            ]
        for file in expired:
            self.delete(file)


def read_part(path: Path, offset: int, num_bytes: int) -> bytes:
    """Some bytes of a file. It is opened for them alone, so that slow readers hold no descriptors."""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(num_bytes)


def append(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
