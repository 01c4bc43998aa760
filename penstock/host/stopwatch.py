"""Time the phases of a start."""

from __future__ import annotations

import time
from typing import TypeVar

T = TypeVar("T")


class Stopwatch:
    """Seconds by phase, one after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def lap(self, phase: str, result: T = None) -> T:  # type: ignore[assignment]
        """Count the time since the last lap to `phase`; returns its result."""
        now_s = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now_s - self._last_s
        self._last_s = now_s
        return result
