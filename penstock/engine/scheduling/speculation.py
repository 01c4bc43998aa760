"""The speculation controller: how many draft tokens each sequence verifies in a step, 0 included.

A draft token is worth verifying while tokens per second rise: it adds its chance of acceptance to the step's tokens and
its cost to the step's time. Costs are measured, chances are those its drafter has shown. Timing thus decides how fast
answers come, and never a token of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from penstock.engine.draft_tree import compute_path_chances
from penstock.engine.plan import Draft, Plan, Result
from penstock.engine.scheduling.drafts.ahead import DraftAhead
from penstock.engine.scheduling.drafts.waits import DraftWaits
from penstock.engine.scheduling.step_costs import StepCosts

RUNGS = (1, *(n << i for i in range(12) for n in (2, 3)))  # draft tokens of a step: a runner records each shape
FIRST_DRAFT_TOKENS = 32  # of a step, before anything was measured
MIN_CHANCE = 0.05  # drafters need not tell of less
SLACK = 0.8  # of the price of a token: it will be another in the next step
MIXED_CHANCE = 0.5  # beside a prompt, before its tokens' price was measured
TRIAL_SHARE = 0.01  # of the time: what trials of steps that were not measured may cost
TRIAL_GAIN = 1.05  # in tokens per second, if all goes well
MAX_CREDIT = 1000  # steps that this is saved up for


class SpeculationController:
    def __init__(self, max_ahead: int = 0, max_rows: int | None = None) -> None:
        """`max_ahead`: tokens that a drafting model may go ahead; 0: there is none. Steps of more than `max_rows`
        sequences, if given, have no drafts."""
        self.costs, self._max_rows = StepCosts(), max_rows
        self.ahead = DraftAhead(self.costs, max_ahead)
        self._num_rows = 0  # of the last step
        self._waits = DraftWaits()
        self._credit_s = 0.0  # that trials may cost now
        self._trial: tuple[int, int] | None = None  # sequences and tokens of the step that is tried

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
        if is_decode:
            self._pay(plan, result, seconds)
        self.costs.note(len(plan.rows) if is_decode else 0, num_tokens, seconds)
        self.ahead.note(plan, result, is_decode)

    def _pay(self, plan: Plan, result: Result, seconds: float) -> None:
        """Save a share of a step's time for trials, and take what a trial cost more than its tokens are worth."""
        rows = len(plan.rows)
        base = self.costs.estimate(rows, rows)
        self._credit_s += TRIAL_SHARE * seconds
        if base is None:
            return
        self._credit_s = min(self._credit_s, TRIAL_SHARE * MAX_CREDIT * base)
        if self._trial == (rows, plan.num_tokens) != (rows, rows):
            gained = sum(1 if isinstance(one, int) else len(one.tokens) for one in result.rows)
            self._credit_s -= max(0.0, seconds - base * gained / rows)

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
        base, more = self.costs.estimate(rows, rows), self.costs.hope(rows, rows + 1)
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
            least = self._find_mixed_chance(num_rows)
            wanted = sum(-path >= least for path, _ in ranked)
        elif self.ahead.is_trial:
            wanted = len(ranked)
        else:
            wanted = self._count_paying([-path for path, _ in ranked], num_rows)
        counts = [0] * len(drafts)
        for _, index in ranked[:wanted]:
            counts[index] += 1
        return counts

    def _find_mixed_chance(self, num_rows: int) -> float:
        """Return the chance from which a token pays beside a prompt: the tokens that come in its time elsewhere."""
        price, base = self.costs.find_price(num_rows), self.costs.estimate(num_rows, num_rows)
        if price is None or not base:
            return MIXED_CHANCE
        return max(MIN_CHANCE, price * num_rows / base)

    def _count_paying(self, paths: list[float], num_rows: int) -> int:
        """Return the rung with the most tokens per second, or one that is worth a trial; some before anything was
        measured."""
        rungs = [rung for rung in RUNGS if rung <= len(paths)]
        self._trial = None
        base = self.costs.estimate(num_rows, num_rows)
        if base is None:
            return max((rung for rung in rungs if rung <= FIRST_DRAFT_TOKENS), default=0)
        if self.costs.find_plain(num_rows) is None:
            return 0  # to measure that first
        gains = [0.0, *accumulate(paths)]
        best, best_rate, tried, tried_rate = 0, num_rows / base, 0, 0.0
        for rung in rungs:
            tokens, cost = num_rows + gains[rung], self.costs.estimate(num_rows, num_rows + rung)
            hope = self.costs.hope(num_rows, num_rows + rung)
            if cost and tokens / cost > best_rate:
                best, best_rate = rung, tokens / cost
            if cost and hope and hope < cost and cost - base * tokens / num_rows <= self._credit_s:
                tried, tried_rate = max((tried_rate, tried), (tokens / hope, rung))[::-1]
        if tried_rate > TRIAL_GAIN * best_rate:
            best, self._trial = tried, (num_rows, num_rows + tried)
        return best
