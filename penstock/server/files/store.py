"""Files of all tenants: an index in memory over records and data in the locked data folder, within limits."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.errors import InvalidConfig, quote
from penstock.hub import home
from penstock.server.http.context import new_id
from penstock.server.http.errors import ApiError

RECORD = ".json"
DATA = ".data"
UNFINISHED = ".part"
MAX_RECORD_BYTES = 1 << 20
Kind = TypeVar("Kind")
log = logging.getLogger("penstock.server")
FILES, BATCHES = "penstock-files", "penstock-batches"
DAY_S = 86400
MAX_AGE_S = 30 * DAY_S  # OpenAI's limit for batch files
MAX_FILES = 10_000
MAX_FILE_BYTES = 200 << 20  # OpenAI's limit for batch inputs
ID = "file-"
_FILE_NAME = re.compile(rf"{ID}[0-9a-f]{{24}}\.\w+", re.ASCII)  # our file names; nothing else is touched


def write_record(path: Path, value: Any) -> None:
    """Replace the record atomically, after an fsync."""
    temporary = path.with_suffix(UNFINISHED)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(value))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_records(folder: Path, kind: type[Kind]) -> Iterator[Kind]:
    """Yield the records; damaged ones are skipped."""
    for path in sorted(folder.glob(f"*{RECORD}")):
        with contextlib.suppress(OSError, msgspec.MsgspecError), open(path, "rb") as file:
            yield msgspec.json.decode(file.read(MAX_RECORD_BYTES), type=kind)


def remove_file(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


@contextlib.contextmanager
def data_folder(folder: str | None, port: int, fallback: Path) -> Iterator[Path]:
    """Lock the given folder, or one for this port under PENSTOCK_HOME. If that fails, and for port 0, use a folder
    under `fallback` that is removed with the server."""
    if folder is not None:
        try:
            path, handle = Path(folder).expanduser(), _open(Path(folder).expanduser())
        except OSError as error:
            raise InvalidConfig(
                f"cannot use data_folder {quote(folder)}: {_describe(error)}; choose another with --data-folder"
            ) from None
    else:
        path, handle = _open_default(port, fallback)
    try:
        yield path
    finally:
        if folder is None:
            _remove_empty(path)
        os.close(handle)


def _open_default(port: int, fallback: Path) -> tuple[Path, int]:
    path = home() / "data" / str(port)
    if port:
        try:
            return path, _open(path)
        except OSError as error:
            log.warning(
                "cannot use %s (%s): files and batches will not outlive this server; give --data-folder",
                path,
                _describe(error),
            )
    return fallback / "data", _open(fallback / "data")


def _open(path: Path) -> int:
    """Make the folder with subfolders private to this user, and lock it; the returned descriptor holds the lock."""
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
    with contextlib.suppress(OSError):  # not empty
        for part in (FILES, BATCHES):
            (path / part).rmdir()
        path.rmdir()


def _describe(error: OSError) -> str:
    return "another server uses it" if isinstance(error, BlockingIOError) else error.strerror or str(error)


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
    """Files by id. Where tenants share it, each gets at most half. Methods are thread-safe; some block on the disk, as
    they say."""

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
        self._held: dict[str, int] = {}  # bytes per tenant, uploads included
        self._pins: Counter[str] = Counter()  # per id: number of batches reading it
        self._lock = threading.Lock()

    def load(self, unfinished: Collection[str] = ()) -> None:
        """Load an earlier server's files (blocks on the disk); data without a record is removed, except `unfinished`
        ids."""
        for file in read_records(self._folder, StoredFile):
            record = self._record_path(file.id)
            if _FILE_NAME.fullmatch(record.name) and record.is_file() and self.path_of(file.id).is_file():
                self._add(file)
                self.reserve(file.tenant, file.num_bytes, is_bounded=False)
        known = {*self._files, *unfinished}
        for path in self._folder.iterdir():
            if _FILE_NAME.fullmatch(path.name) and (path.suffix == UNFINISHED or path.stem not in known):
                remove_file(path)

    def path_of(self, id: str) -> Path:
        return self._folder / (id + DATA)

    def _record_path(self, id: str) -> Path:
        return self._folder / (id + RECORD)

    def unfinished_path(self, id: str) -> Path:
        return self._folder / (id + UNFINISHED)

    def reserve(self, tenant: str, num_bytes: int, *, is_bounded: bool = True) -> None:
        """Reserve bytes for a tenant; ApiError if they exceed the limits."""
        with self._lock:
            limit = self.max_bytes // 2 if self._is_shared() else self.max_bytes
            num_own, total = self._held.get(tenant, 0), sum(self._held.values())
            if is_bounded and num_bytes > 0 and (num_own + num_bytes > limit or total + num_bytes > self.max_bytes):
                raise ApiError(
                    413,
                    f"no room for this file: your files have {num_own} bytes of at most {limit}, "
                    f"and all files together {total} of {self.max_bytes}; delete some, or start the "
                    "server with a larger --max-files-mb",
                    code="storage_full",
                    headers={"Connection": "close"},
                )
            self._held[tenant] = num_own + num_bytes
            if not self._held[tenant]:
                del self._held[tenant]

    def release(self, tenant: str, num_bytes: int) -> None:
        self.reserve(tenant, -num_bytes)

    def check_number(self, tenant: str) -> None:
        """Raise ApiError if the tenant has reached its number of files."""
        limit = MAX_FILES // 2 if self._is_shared() else MAX_FILES
        with self._lock:
            num_own = sum(file.tenant == tenant for file in self._files.values())
        if num_own >= limit or len(self._files) >= MAX_FILES:
            raise ApiError(
                413,
                f"you have {num_own} files, and there are {len(self._files)} in all: the limits are {limit} "
                f"and {MAX_FILES}; delete some",
                code="storage_full",
            )

    def add(self, file: StoredFile) -> None:
        """Record a file whose data is in place and whose bytes are reserved (blocks on the disk)."""
        write_record(self._record_path(file.id), file)
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

    def list_for(self, tenant: str) -> list[StoredFile]:
        """List a tenant's files, oldest first."""
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
                f"no file {quote(id)}: it was deleted, has expired, or is another client's",
                param=param,
                code="file_not_found",
            )
        return file

    def pin(self, id: str, count: int = 1) -> None:
        """Protect a file from deletion; undone with a count of -1."""
        with self._lock:
            self._pins[id] += count
            if not self._pins[id]:
                del self._pins[id]

    def delete(self, file: StoredFile) -> None:
        """Delete a file (blocks on the disk), its record first, so that it cannot reappear in part."""
        with self._lock:
            if file.id in self._pins:
                raise ApiError(
                    409, f"{file.id} is in use by a running batch: cancel the batch, or wait for it", code="file_in_use"
                )
            if self._files.pop(file.id, None) is None:
                return
        remove_file(self._record_path(file.id))
        remove_file(self.path_of(file.id))
        self.release(file.tenant, file.num_bytes)

    def delete_expired(self) -> None:
        """Delete expired files (blocks on the disk)."""
        with self._lock:
            expired = [
                file for file in self._files.values() if file.expires_at <= self._clock() and file.id not in self._pins
            ]
        for file in expired:
            self.delete(file)


def read_range(path: Path, offset: int, num_bytes: int) -> bytes:
    """Read a range of a file; opened per call, so that slow readers hold no descriptor."""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(num_bytes)


def append(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
