"""The router's count of prompts that one server computed for another."""

from __future__ import annotations


class HandoverCounts:
    """Figures for the metrics."""

    def __init__(self) -> None:
        self.num_done = self.num_failed = 0
        self.seconds = 0.0

    def count(self, seconds: float) -> None:
        self.num_done += 1
        self.seconds += seconds
