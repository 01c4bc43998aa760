"""Tell when an engine process hangs, and how long to wait before another is started."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.engine.ipc import BEAT_S
from penstock.engine.messages import Beat

WATCH_S = 0.25
MAX_LATE_S = 1.0  # of the check itself: beyond, this process was suspended and knows nothing
MIN_CONFIRMATIONS = 3  # consecutive checks that must agree
MIN_LOAD_SILENCE_S = 20.0  # importing large libraries holds the GIL
HEALTHY_S = 5.0  # after which an idle engine counts as healthy
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0


class Watchdog:
    def __init__(self, hang_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.hang_s = hang_s
        self.step_s = 0.0
        self._clock = clock
        self._beat_s = self._checked_s = clock()
        self._ready_s: float | None = None
        self._num_confirmed = 0
        self._num_load_hangs = 0

    def start(self) -> None:
        self._beat_s, self.step_s, self._ready_s, self._num_confirmed = self._clock(), 0.0, None, 0

    def mark_ready(self) -> None:
        self._ready_s = self._beat_s = self._clock()
        self._num_load_hangs = 0

    def record(self, beat: Beat) -> None:
        self._beat_s, self.step_s = self._clock(), beat.step_s

    @property
    def is_alive(self) -> bool:
        """True if the last heartbeat is recent and its step not too long."""
        return self._clock() - self._beat_s < 2 * BEAT_S and self.step_s < self.hang_s

    @property
    def is_stepping(self) -> bool:
        return self.is_alive and self.step_s < BEAT_S

    @property
    def is_healthy(self) -> bool:
        """True if the engine has been ready for a while."""
        return self._ready_s is not None and self.is_alive and self._clock() - self._ready_s > HEALTHY_S

    @property
    def silent_s(self) -> float:
        return self._clock() - self._beat_s

    @property
    def max_silent_s(self) -> float:
        """Max time between heartbeats; longer while loading, doubled after each failure to load in time."""
        if self._ready_s is not None:
            return self.hang_s
        return float(max(self.hang_s, MIN_LOAD_SILENCE_S) * 2 ** min(self._num_load_hangs, 6))

    def check(self) -> bool:
        """Check once, every WATCH_S; True if the process hangs. After a suspension, pending heartbeats are read
        first."""
        now = self._clock()
        late, self._checked_s = now - self._checked_s > WATCH_S + MAX_LATE_S, now
        if late:
            self._beat_s, self.step_s, self._num_confirmed = max(self._beat_s, now - BEAT_S), 0.0, 0
            return False
        hangs = self.silent_s > self.max_silent_s or self._ready_s is not None and self.step_s > self.hang_s
        self._num_confirmed = self._num_confirmed + 1 if hangs else 0
        if self._num_confirmed < MIN_CONFIRMATIONS:
            return False
        self._num_confirmed = 0
        self._num_load_hangs += self._ready_s is None
        return True


class Backoff:
    """Delay before a restart: none after a healthy run, then doubling."""

    def __init__(self) -> None:
        self.num_failures = 0

    def fail(self) -> float:
        """Count a failure; return the seconds to wait."""
        self.num_failures += 1
        if self.num_failures == 1:
            return 0.0
        return float(min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** min(self.num_failures - 2, 30)))

    def reset(self) -> None:
        self.num_failures = 0
