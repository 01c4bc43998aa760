"""Judging from afar whether an engine process lives, and when to try another."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.engine.ipc import BEAT_S
from penstock.engine.messages import Beat

WATCH_S = 0.25
MAX_LATE_S = 1.0  # for the watch itself: beyond, the API process stood still and knows nothing of the engine
CONFIRMATIONS = 3  # looks, one after another and in time, that must agree
MIN_LOAD_SILENCE_S = 20.0  # importing and mapping large libraries holds the interpreter's lock
HEALTHY_S = 5.0  # of life after which an engine without work counts as healthy
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0


class Vitals:
    """Signs of life of one process after another."""

    def __init__(self, hang_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.hang_s = hang_s
        self.step_s = 0.0
        self._clock = clock
        self._beat_s = self._looked_s = clock()
        self._ready_s: float | None = None
        self._num_agreeing = 0
        self._num_load_hangs = 0

    def begin(self) -> None:
        """A new process was started."""
        self._beat_s, self.step_s, self._ready_s, self._num_agreeing = self._clock(), 0.0, None, 0

    def ready(self) -> None:
        self._ready_s = self._beat_s = self._clock()
        self._num_load_hangs = 0

    def take(self, beat: Beat) -> None:
        self._beat_s, self.step_s = self._clock(), beat.step_s

    @property
    def is_fresh(self) -> bool:
        """True while the last sign of life is recent and its step not too old."""
        return self._clock() - self._beat_s < 2 * BEAT_S and self.step_s < self.hang_s

    @property
    def is_stepping(self) -> bool:
        return self.is_fresh and self.step_s < BEAT_S

    @property
    def is_healthy(self) -> bool:
        """True for an engine that has been ready for a while."""
        return self._ready_s is not None and self.is_fresh and self._clock() - self._ready_s > HEALTHY_S

    @property
    def silent_s(self) -> float:
        return self._clock() - self._beat_s

    @property
    def max_silent_s(self) -> float:
        """The limit is longer while loading, and doubles where that was not enough."""
        if self._ready_s is not None:
            return self.hang_s
        return float(max(self.hang_s, MIN_LOAD_SILENCE_S) * 2 ** min(self._num_load_hangs, 6))

    def look(self) -> bool:
        """Look once, every WATCH_S; True when the process hangs. What came while this process stood still is read
        before anything is concluded from it."""
        now = self._clock()
        late, self._looked_s = now - self._looked_s > WATCH_S + MAX_LATE_S, now
        if late:
            self._beat_s, self.step_s, self._num_agreeing = max(self._beat_s, now - BEAT_S), 0.0, 0
            return False
        hangs = self.silent_s > self.max_silent_s or self._ready_s is not None and self.step_s > self.hang_s
        self._num_agreeing = self._num_agreeing + 1 if hangs else 0
        if self._num_agreeing < CONFIRMATIONS:
            return False
        self._num_agreeing = 0
        self._num_load_hangs += self._ready_s is None
        return True


class Backoff:
    """How long to wait before the next try: not at all after a healthy life, then twice as long each time."""

    def __init__(self) -> None:
        self.num_failures = 0

    def fail(self) -> float:
        """Count a failure; the seconds to wait."""
        self.num_failures += 1
        if self.num_failures == 1:
            return 0.0
        return float(min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** min(self.num_failures - 2, 30)))

    def reset(self) -> None:
        self.num_failures = 0
