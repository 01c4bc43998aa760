"""Choose who waits for verified drafts where a device knows no count of its own: all rows, or those that verify alone.

If all wait, every row is in every step, and the device is idle while the host accounts for one and plans the next. If
rows wait for their own plan alone, the others keep the device busy, and those that draft are in every other step.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.plan import Plan, Result

FADE = 0.9  # of what was measured before, with each step
MIN_GAIN = 1.0  # tokens that a draft must promise to be worth the step that its row misses


class DraftWaits:
    def __init__(self) -> None:
        self._idle_s: float | None = None  # mean, of steps that were planned when nothing else was under way
        self._step_s: float | None = None  # mean, of all steps that decode

    def note(self, plan: Plan, result: Result, was_alone: bool) -> None:
        """Take note of a step, and how long the device had waited for it if no other plan had been started."""
        if result.error is not None or result.step_s <= 0 or any(row.count > 1 + len(row.draft) for row in plan.rows):
            return
        self._step_s = _mix(self._step_s, result.step_s)
        if was_alone:
            self._idle_s = _mix(self._idle_s, result.idle_s)

    def choose(self, num_rows: int, gains: Sequence[float]) -> bool:
        """True if all rows are to wait, by tokens per second. `gains` are the tokens that drafts promise, of each row
        that has some."""
        if self._step_s is None or self._idle_s is None:
            return True  # to measure that
        together = (num_rows + sum(gains)) / (self._step_s + self._idle_s)
        apart = (num_rows + sum(max(0.0, (gain - MIN_GAIN) / 2) for gain in gains)) / self._step_s
        return together >= apart


def _mix(mean: float | None, value: float) -> float:
    return value if mean is None else FADE * mean + (1 - FADE) * value
