"""One energy counter for all engines of a server: each joule is counted for one of them.

A file in the server's folder holds the counter's last value and a slot for each process. Whoever becomes busy or idle
first shares what was used since then: equally among those that were busy, or among all where none was.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

MAX_PROCESSES = 256
SLOT = 3  # numbers: a process's id or 0, 1 while it is busy, and its joules
PID, BUSY, JOULES = range(SLOT)
LOCK_TRIES, LOCK_S = 10, 0.001  # one that is stopped while it holds the lock must not stop the others


class Counter(Protocol):
    name: str

    def read(self) -> int: ...

    def count_joules(self, before: float, now: float) -> float:
        """Return what was used between two readings."""


class SharedCounter:
    """This process's share of a counter, by the file in `folder`; without one, all of it."""

    def __init__(self, counter: Counter, folder: Path | None) -> None:
        self._counter, self._handle = counter, -1
        size = 8 * (1 + SLOT * MAX_PROCESSES)
        if folder is not None:
            self._handle = os.open(folder / f"energy-{counter.name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._handle, size)
        self._numbers = memoryview(mmap.mmap(self._handle, size)).cast("d")
        with self._lock() as is_locked:
            if not is_locked:
                raise OSError(f"the counter {counter.name} is locked")
            self._share(counter.read())
            self._slot = next((slot for slot in _slots() if not self._numbers[slot]), 0)
            if not self._slot:
                raise OSError(f"{MAX_PROCESSES} processes share the counter {counter.name}")
            for place, value in ((PID, os.getpid()), (BUSY, 0.0), (JOULES, 0.0)):
                self._numbers[self._slot + place] = value

    def read(self, is_busy: bool) -> float:
        """Return this process's joules; from now on it counts as busy or idle."""
        now = self._counter.read()
        with self._lock() as is_locked:
            if is_locked:
                self._share(now)
            self._numbers[self._slot + BUSY] = is_busy
        return self._numbers[self._slot + JOULES]

    def _share(self, now: int) -> None:
        """Share what was used since the last reading, and forget processes that ended."""
        before, self._numbers[0] = self._numbers[0], now
        living = [slot for slot in _slots() if self._numbers[slot] and self._is_alive(slot)]
        busy = [slot for slot in living if self._numbers[slot + BUSY]] or living
        for slot in busy:
            self._numbers[slot + JOULES] += self._counter.count_joules(before, now) / len(busy)

    def _is_alive(self, slot: int) -> bool:
        with suppress(PermissionError):
            try:
                os.kill(int(self._numbers[slot]), 0)
            except ProcessLookupError:
                self._numbers[slot] = 0
                return False
        return True

    @contextmanager
    def _lock(self) -> Iterator[bool]:
        """Lock the file; False if another process does not let it go."""
        if self._handle < 0:
            yield True
            return
        is_locked = False
        for _ in range(LOCK_TRIES):
            with suppress(BlockingIOError):
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_locked = True
                break
            time.sleep(LOCK_S)
        try:
            yield is_locked
        finally:
            if is_locked:
                fcntl.flock(self._handle, fcntl.LOCK_UN)


def _slots() -> range:
    return range(1, 1 + SLOT * MAX_PROCESSES, SLOT)
