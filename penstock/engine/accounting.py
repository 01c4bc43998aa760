"""Counts of steps for the metrics, and energy shared among requests by the tokens that are computed for them."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from penstock.engine.messages import STEP_TOKENS
from penstock.engine.plan import Plan
from penstock.types import Delta

WINDOW_S = 0.1  # between two readings while requests run


class EnergyAccount:
    """Reads a counter when requests begin, end, and every WINDOW_S between. What was used meanwhile goes to requests
    in proportion to the tokens computed for each; what is used while none runs is idle."""

    def __init__(self, read: Callable[[bool], float], clock: Callable[[], float] = time.monotonic) -> None:
        """`read` is told if requests run from now on: engines share a counter by it."""
        self._read: Callable[[bool], float] | None = read
        self._clock, self._lock = clock, threading.Lock()  # heartbeats read it too
        self.busy_j = self.idle_j = 0.0
        self._owners: dict[int, str] = {}  # by row
        self._tokens: dict[str, int] = {}  # since the last reading
        self._last_j, self._last_s, self._is_busy = read(False), clock(), False

    def watch(self, plan: Plan) -> None:
        """Note who gets the tokens of a step that is about to start."""
        if not self._is_busy:
            self.idle_j += self._advance(True)
            self._is_busy = True
        for admission in plan.admissions:
            self._owners[admission.row] = admission.request.id
        tokens, owners = self._tokens, self._owners
        for row in plan.rows:
            owner = owners.get(row.row, "")
            tokens[owner] = tokens.get(owner, 0) + row.count

    def settle(self, deltas: Sequence[Delta], has_work: bool) -> dict[str, float]:
        """Return joules by request id where it is time to read: after a step that ended an answer, or the last one."""
        is_due = not has_work or self._clock() - self._last_s >= WINDOW_S
        if not self._is_busy or not (is_due or any(delta.finish_reason is not None for delta in deltas)):
            return {}
        used, total = self._advance(has_work), sum(self._tokens.values())
        self.busy_j += used
        self._is_busy = has_work
        shares = {id: used * count / total for id, count in self._tokens.items() if id} if total and used else {}
        self._tokens = {}
        return shares

    def rest(self) -> None:
        """Count what has been used since the last request as idle."""
        if not self._is_busy:
            self.idle_j += self._advance(False)

    def _advance(self, is_busy: bool) -> float:
        """Return the joules since the last reading; none any more once the counter is gone."""
        with self._lock:
            self._last_s = self._clock()
            if self._read is None:
                return 0.0
            try:
                now = self._read(is_busy)
            except (OSError, ValueError):
                self._read = None
                return 0.0
            used, self._last_j = max(0.0, now - self._last_j), now
            return used


class StepAccount:
    """Counts steps by their tokens, and has the energy account where the hardware tells."""

    def __init__(self) -> None:
        self.energy: EnergyAccount | None = None
        self._counts = [0] * (len(STEP_TOKENS) + 1)
        self._num_tokens = 0

    def watch(self, plan: Plan) -> None:
        self._counts[bisect_left(STEP_TOKENS, plan.num_tokens)] += 1
        self._num_tokens += plan.num_tokens
        if self.energy is not None:
            self.energy.watch(plan)

    def stats(self) -> dict[str, float]:
        found: dict[str, float] = {f"num_steps_to_{end}": count for end, count in zip(STEP_TOKENS, self._counts)}
        found |= {"num_steps_beyond": self._counts[-1], "num_step_tokens": self._num_tokens}
        if self.energy is not None:
            found |= {"busy_j": self.energy.busy_j, "idle_j": self.energy.idle_j}
        return found
