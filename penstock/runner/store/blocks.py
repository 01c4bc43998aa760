"""The store of a runner: the blocks used last in memory, and all in files as far as there is room."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping

from penstock.cache.store import DIGEST_BYTES
from penstock.runner.store.files import FileTier

SENT, FETCHED, MISSING = "num_sent_blocks", "num_fetched_blocks", "num_missing_blocks"
FETCHED_BYTES, FETCH_MS = "num_fetched_bytes", "fetch_ms"
TRAFFIC = (SENT, FETCHED, MISSING, FETCHED_BYTES, FETCH_MS)


class BlockStore:
    """`max_bytes` in memory. What is dropped there is in the files still, if there are any. `part` tells apart what
    several ranks keep under one name. Threads may read and add blocks beside the engine's own."""

    def __init__(self, max_bytes: int, files: FileTier | None = None, part: bytes = b"") -> None:
        self.max_bytes, self.files, self._part = max_bytes, files, part
        self.num_bytes = self.num_hits = self.num_misses = 0
        self._memory: OrderedDict[bytes, bytes] = OrderedDict()  # the least recently used one first
        self._lock = threading.Lock()  # of the memory
        self._traffic: Counter[str] = Counter()  # blocks and bytes exchanged with other servers

    def _own(self, name: bytes) -> bytes:
        """Return the name of this rank's part of a block."""
        if not self._part:
            return name
        return hashlib.blake2b(self._part + name, digest_size=DIGEST_BYTES).digest() + name[DIGEST_BYTES:]

    def has(self, name: bytes) -> bool:
        name = self._own(name)
        return name in self._memory or self.files is not None and name in self.files

    def save(self, name: bytes, data: bytes) -> None:
        name = self._own(name)
        self._keep(name, data)
        if self.files is not None:
            self.files.put(name, data)

    def load(self, name: bytes) -> bytes | None:
        """Return a block's bytes; None if they are lost."""
        data = self.read(name)
        if data is None:
            self.num_misses += 1
        else:
            self.num_hits += 1
        return data

    def read(self, name: bytes) -> bytes | None:
        """Return a block's bytes as `load` does, uncounted."""
        name = self._own(name)
        with self._lock:
            data = self._memory.get(name)
            if data is not None:
                self._memory.move_to_end(name)
        if data is None and self.files is not None:
            data = self.files.get(name)
            if data is not None:
                self._keep(name, data)
        return data

    def note_traffic(self, counts: Mapping[str, int]) -> None:
        """Add to the figures of what goes to other servers and comes from them."""
        with self._lock:
            self._traffic.update(counts)

    def drop(self, name: bytes) -> None:
        """Forget a block that is damaged, or not of the size that it should have."""
        name = self._own(name)
        with self._lock:
            data = self._memory.pop(name, None)
            self.num_bytes -= len(data) if data is not None else 0
        if self.files is not None:
            self.files.drop(name)

    def flush(self) -> None:
        if self.files is not None:
            self.files.flush()

    def refresh(self) -> None:
        if self.files is not None:
            self.files.refresh()

    def forget(self) -> None:
        with self._lock:
            self._memory.clear()
            self.num_bytes = 0
        if self.files is not None:
            self.files.forget()

    def count(self) -> dict[str, int]:
        files = self.files
        return {
            "num_store_blocks": len(self._memory) if files is None else max(len(self._memory), len(files)),
            "num_store_bytes": self.num_bytes,
            "num_store_file_bytes": files.num_bytes if files is not None else 0,
            "num_store_hits": self.num_hits,
            "num_store_misses": self.num_misses,
            "num_store_errors": files.num_errors if files is not None else 0,
            **{name: self._traffic[name] for name in TRAFFIC},
        }

    def close(self) -> None:
        if self.files is not None:
            self.files.close()

    def _keep(self, name: bytes, data: bytes) -> None:
        if len(data) > self.max_bytes:
            return
        with self._lock:
            if name in self._memory:
                return
            self._memory[name] = data
            self.num_bytes += len(data)
            while self.num_bytes > self.max_bytes:
                _, dropped = self._memory.popitem(last=False)
                self.num_bytes -= len(dropped)
