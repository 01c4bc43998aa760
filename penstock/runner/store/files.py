"""Blocks in a folder of segments, which outlive the process and may be shared by several. A thread writes them."""

from __future__ import annotations

import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from penstock.errors import InvalidConfig, quote
from penstock.runner.store.segment import SUFFIX, Record, SegmentWriter, read_record, scan_records

FOLDER = "penstock-kv-1"  # with the format's version
MAX_PENDING_BYTES = 256 << 20  # not written yet
MAX_SEGMENT_BYTES = 256 << 20
NUM_SEGMENTS = 16  # that the bound is divided into, at least
PAUSE_S = 10.0  # after an error
_log = logging.getLogger(__name__)


class FileTier:
    def __init__(self, path: str, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = _make_folder(path)
        self.max_bytes = max_bytes
        self.num_errors = self.num_bytes = 0
        self._segment_bytes = max(1, min(MAX_SEGMENT_BYTES, max_bytes // NUM_SEGMENTS))
        self._clock, self._paused_until = clock, 0.0
        self._lock = threading.Lock()
        self._records: dict[bytes, Record] = {}
        self._scanned: dict[Path, int] = {}  # bytes of others' segments
        self._pending: dict[bytes, bytes] = {}
        self._pending_bytes = 0
        self._writer: SegmentWriter | None = None
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.refresh()
        self._thread = threading.Thread(target=self._write_all, name="penstock-kv-files", daemon=True)
        self._thread.start()

    def __contains__(self, name: bytes) -> bool:
        return name in self._pending or name in self._records

    def __len__(self) -> int:
        return len(self._records)

    def put(self, name: bytes, data: bytes) -> bool:
        """Have a block written; False if too much waits, or the folder cannot be written to for now."""
        if self._pending_bytes + len(data) > MAX_PENDING_BYTES or self._clock() < self._paused_until:
            return False
        with self._lock:
            self._pending[name] = data
            self._pending_bytes += len(data)
        self._queue.put(name)
        return True

    def get(self, name: bytes) -> bytes | None:
        """Return a block's bytes; one that is damaged or gone is forgotten."""
        with self._lock:
            found, record = self._pending.get(name), self._records.get(name)
        if found is not None or record is None:
            return found
        data = read_record(name, record)
        if data is None:
            self.num_errors += 1
            self.drop(name)
        return data

    def drop(self, name: bytes) -> None:
        with self._lock:
            self._records.pop(name, None)

    def refresh(self) -> None:
        """Take note of what other processes wrote, and of segments that are gone. Of a block that is in several, the
        latest counts: it may have been written since another was damaged."""
        sizes = {path: _size(path) for path in self._list_segments()}
        own = self._writer
        found: dict[bytes, Record] = {}
        for path, size in sizes.items():
            start = self._scanned.get(path, 0)
            if size <= start or own is not None and path == own.path:
                continue
            try:
                for name, record in scan_records(path, start, size):
                    found[name] = record
                    start = record.start + record.length
            except OSError:
                continue
            self._scanned[path] = start
        with self._lock:
            self._records |= found
            self.num_bytes = sum(sizes.values())
            gone = self._scanned.keys() - sizes.keys()
            if gone:
                self._scanned = {path: start for path, start in self._scanned.items() if path not in gone}
                self._records = {name: record for name, record in self._records.items() if record.path not in gone}

    def forget(self) -> None:
        """Remove all segments, those of other processes too."""
        self.flush()
        with self._lock:
            self._records = {}
            self._close_writer()
        for path in self._list_segments():
            self._remove(path)
        self.num_bytes = 0

    def flush(self) -> None:
        """Wait until all that was put is written or given up."""
        while self._pending and self._thread.is_alive():
            time.sleep(0.001)

    def close(self) -> None:
        self.flush()
        self._queue.put(None)
        self._thread.join()
        self._close_writer()

    def _write_all(self) -> None:
        while (name := self._queue.get()) is not None:
            data = self._pending.get(name)
            if data is None:
                continue
            record = None
            try:
                record = self._append(name, data)
            except OSError as error:
                self._pause(error)
            with self._lock:
                if record is not None:
                    self._records[name] = record
                del self._pending[name]
                self._pending_bytes -= len(data)

    def _append(self, name: bytes, data: bytes) -> Record | None:
        if name in self._records or self._clock() < self._paused_until:
            return None
        writer = self._writer
        if writer is not None and (writer.size + len(data) > self._segment_bytes or writer.is_gone):
            with self._lock:
                self._scanned[writer.path] = writer.size
                self._close_writer()
                writer = None
        if writer is None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have removed it
            self._drop_oldest()
            writer = self._writer = SegmentWriter(self.folder)
        record = writer.append(name, data)
        self.num_bytes += len(data)
        return record

    def _pause(self, error: OSError) -> None:
        """Write nothing for a while, and say so once."""
        if not self.num_errors:
            _log.warning("cache blocks cannot be written to %s, and are kept in memory only: %s", self.folder, error)
        self.num_errors += 1
        self._paused_until = self._clock() + PAUSE_S

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _list_segments(self) -> list[Path]:
        """Return all segments, the oldest first."""
        found = []
        try:
            entries = list(os.scandir(self.folder))
        except OSError:
            return []  # the folder is gone, or cannot be read for now
        for entry in entries:
            try:
                if _is_segment(entry):
                    found.append((entry.stat().st_mtime_ns, Path(entry.path)))
            except OSError:
                continue  # another process has just removed it
        return [path for _, path in sorted(found)]

    def _drop_oldest(self) -> None:
        """Make room for one more segment within the bound."""
        sizes = {path: _size(path) for path in self._list_segments()}
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total + self._segment_bytes <= self.max_bytes:
                break
            self._remove(path)
            total -= size
        self.num_bytes = total

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._pause(error)
            return
        with self._lock:
            self._records = {name: record for name, record in self._records.items() if record.path != path}


def _is_segment(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _make_folder(path: str) -> Path:
    """Make the folder of segments in `path`, readable by its user alone: they hold the states of prompts."""
    folder = Path(path).expanduser() / FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise InvalidConfig(
                f"kv_offloading_path={quote(path)}: {FOLDER} in it is a link or another user's: name another one"
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise InvalidConfig(
            f"kv_offloading_path={quote(path)} cannot be used: {error.strerror or error}: name a folder that this "
            "process may write to"
        ) from None
    return folder
