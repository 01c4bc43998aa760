"""The speculation controller: how many draft tokens each sequence verifies in a step, 0 included.

A draft token is worth verifying while tokens per second rise: it adds its chance of acceptance to the step's tokens and
its cost to the step's time. Costs are measured, chances are those its drafter has shown. Timing thus decides how fast
answers come, and never a token of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.draft_tree import compute_path_chances
from penstock.engine.plan import Draft, Plan, Result
from penstock.engine.scheduling.drafts.ahead import DraftAhead
from penstock.engine.scheduling.drafts.waits import DraftWaits
from penstock.engine.scheduling.step_costs import StepCosts

RUNGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # draft tokens of a step: a runner records each shape of step
MAX_DRAFT_TOKENS = RUNGS[-1]  # of a step
MIN_CHANCE = 0.05  # drafters need not tell of less
SLACK = 0.8  # of the price of a token: it will be another in the next step
MIXED_CHANCE = 0.5  # beside a prompt, whose tokens are as dear


class SpeculationController:
    def __init__(self, max_ahead: int = 0, max_rows: int | None = None) -> None:
        """`max_ahead`: tokens that a drafting model may go ahead; 0: there is none. Steps of more than `max_rows`
        sequences, if given, have no drafts."""
        self.costs, self._max_rows = StepCosts(), max_rows
        self.ahead = DraftAhead(self.costs, max_ahead, MAX_DRAFT_TOKENS)
        self._num_rows = 0  # of the last step
        self._waits = DraftWaits()

    def all_wait(self, num_rows: int, gains: Sequence[float]) -> bool:
        """True if no row is to be planned while some verify drafts, on a device that knows no count of its own."""
        return self._waits.choose(num_rows, gains)

    def note(self, plan: Plan, result: Result, was_alone: bool = True) -> None:
        """Take note of a step's cost. Steps that compute prompts tell what many tokens cost."""
        self._waits.note(plan, result, was_alone)
        if result.error is not None or result.step_s <= 0:
            return
        self._num_rows = len(plan.rows)
        is_decode = all(row.count == 1 + len(row.draft) for row in plan.rows)
        num_tokens = plan.num_tokens if is_decode else 1 << (plan.num_tokens - 1).bit_length()
        seconds = (result.step_s + result.idle_s) * num_tokens / plan.num_tokens
        self.costs.note(len(plan.rows) if is_decode else 0, num_tokens, seconds)
        self.ahead.note(plan, result, is_decode)

    def choose_ahead(self, num_rows: int) -> int:
        """Return how many tokens a drafting model is to go ahead after a step of `num_rows` sequences."""
        return 0 if self._has_too_many(num_rows) else self.ahead.choose(num_rows)

    def _has_too_many(self, num_rows: int) -> bool:
        return self._max_rows is not None and num_rows > self._max_rows

    @property
    def min_chance(self) -> float:
        """The least chance at which the next step may want a draft token."""
        rows = self._num_rows
        if self._has_too_many(rows):
            return 1.0
        base, more = self.costs.estimate(rows, rows), self.costs.estimate(rows, rows + 1)
        if not rows or base is None or more is None:
            return MIN_CHANCE
        return max(MIN_CHANCE, SLACK * rows * (more - base) / base)

    def choose(self, drafts: Sequence[Sequence[Draft]], num_rows: int, room: int, is_mixed: bool) -> list[int]:
        """Return how many tokens of each draft to verify in a step of `num_rows` sequences: `room` in all at most, the
        likeliest first, so that none comes without its parent."""
        if self._has_too_many(num_rows):
            return [0] * len(drafts)
        ranked = sorted(
            ((-path, index) for index, draft in enumerate(drafts) for path in compute_path_chances(draft)),
            key=lambda one: one[0],
        )[:room]
        if is_mixed:
            wanted = sum(-path >= MIXED_CHANCE for path, _ in ranked)
        elif self.ahead.is_trial:
            wanted = len(ranked)
        else:
            wanted = self._count_paying([-path for path, _ in ranked], num_rows)
        counts = [0] * len(drafts)
        for _, index in ranked[:wanted]:
            counts[index] += 1
        return counts

    def _count_paying(self, paths: list[float], num_rows: int) -> int:
        """Return the rung with the most tokens per second; the largest before anything was measured."""
        rungs = [rung for rung in RUNGS if rung <= len(paths)]
        best, best_rate = 0, self._rate(num_rows, num_rows, 0.0)
        if best_rate is None:
            return rungs[-1] if rungs else 0
        for rung in rungs:
            rate = self._rate(num_rows, num_rows + rung, sum(paths[:rung]))
            if rate is not None and rate > best_rate:
                best, best_rate = rung, rate
        return best

    def _rate(self, num_rows: int, num_tokens: int, gained: float) -> float | None:
        cost = self.costs.estimate(num_rows, num_tokens)
        return None if cost is None else (num_rows + gained) / cost
