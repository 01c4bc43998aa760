"""The number of tokens that a drafting model goes ahead of each sequence, 0 included.

Its time counts: it drafts where tokens per second rise with it. Plain steps are measured first, then a few with drafts.
A model that does not pay rests, and is tried again after 32, 64, 128 … tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.speculation import MODEL_METHODS
from penstock.engine.draft_tree import follow
from penstock.engine.plan import Plan, Result, Row, RowResult
from penstock.engine.scheduling.step_costs import MIN_SAMPLES, StepCosts

TRIED = 2 * (MIN_SAMPLES + 3)  # steps of the first trial, of two lengths; on a CPU the first two of a shape are slow
TRIED_AGAIN = 4  # of later ones
TRIED_EVERY = 512  # tokens of a sequence: places that are not drafted are not judged
FIRST_REST = 32  # tokens of a sequence
MAX_REST = 4096
PRIOR, PRIOR_WEIGHT = 0.6, 4.0  # of acceptance, before anything was verified
MAX_JUDGED = 128.0  # draft tokens of a place; older ones fade
GAIN = 1.02  # in tokens per second: less is noise


class DraftAhead:
    def __init__(self, costs: StepCosts, most: int) -> None:
        self.costs, self.most = costs, most
        self.draft_costs = StepCosts()  # by sequences, and draft tokens of all of them
        self._accepted, self._judged = [0.0] * most, [0.0] * most  # by place, given that those before were right
        self._tries, self._next_rest = TRIED, FIRST_REST
        self._rest = 0.0  # tokens of a sequence that it still rests; below 0: that have come since
        self.is_trial = False  # draft tokens that wait are verified in any case, to measure that
        self.price = 0.0  # tokens of a row that could come in the time that its draft takes

    def note(self, plan: Plan, result: Result, is_decode: bool) -> None:
        """Take note of a step: time that the model took, draft tokens that were accepted."""
        if not self.most:
            return
        if plan.ahead and is_decode and result.draft_s > 0 and not any(map(_has_text, result.rows)):
            self.draft_costs.note(len(plan.rows), len(plan.rows) * plan.ahead, result.draft_s)
        for row, outcome in zip(plan.rows, result.rows):
            tokens = (outcome,) if isinstance(outcome, int) else outcome.tokens
            self._rest -= len(tokens) / len(plan.rows)
            if row.draft and row.draft[0].drafter in MODEL_METHODS:
                self._judge_row(row, tokens)

    def _judge_row(self, row: Row, tokens: Sequence[int]) -> None:
        """Compare a draft of the model's with the tokens that came. A text's draft says nothing about the model."""
        accepted = len(follow(row.draft, tokens))
        for place in range(min(accepted, self.most)):
            self._judge(place, True)
        if accepted < min(len(row.draft), len(tokens), self.most):
            self._judge(accepted, False)

    def _judge(self, place: int, is_accepted: bool) -> None:
        self._accepted[place] += is_accepted
        self._judged[place] += 1
        if self._judged[place] > MAX_JUDGED:
            self._accepted[place] /= 2
            self._judged[place] /= 2

    def choose(self, num_rows: int) -> int:
        """Return the tokens to draft for each of `num_rows` sequences of the step that is planned."""
        self.is_trial, self.price = False, 0.0
        if not self.most or not num_rows or self._rest > 0 or self.costs.find_fastest(num_rows, num_rows) is None:
            return 0
        most = self._find_most(num_rows)
        if not most:
            return 0
        if self._tries:
            self._tries -= 1
            self.is_trial = True
            return 1 if self._tries % 2 else most
        best = self._find_best(num_rows, most)
        if best:
            self._next_rest, self.price = FIRST_REST, self._find_price(num_rows, best)
            if best < most and self._rest < -TRIED_EVERY:
                self._tries, self._rest = TRIED_AGAIN, 0
            return best
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, MAX_REST)
        self._tries = TRIED_AGAIN
        return 0

    def _find_most(self, num_rows: int) -> int:
        """Return the longest length that can pay if all of its tokens are right, as far as is known."""
        base = self.costs.estimate(num_rows, num_rows)
        if base is None:
            return 0
        for length in range(self.most, 0, -1):
            step_s = self.costs.hope(num_rows, num_rows * (1 + length))
            if step_s is not None and (1 + length) * base > GAIN * step_s:
                return length
        return 0

    def _find_best(self, num_rows: int, most: int) -> int:
        """Return the length with the most tokens per second; 0 if none is better than no drafts, or measured."""
        base = self.costs.estimate(num_rows, num_rows)
        if base is None:
            return 0
        best, best_rate = 0, GAIN / base
        path = 1.0
        tokens = 1.0  # of each sequence
        for length in range(1, most + 1):
            place = length - 1
            path *= (PRIOR * PRIOR_WEIGHT + self._accepted[place]) / (PRIOR_WEIGHT + self._judged[place])
            tokens += path
            step_s = self.costs.estimate(num_rows, num_rows * (1 + length))
            draft_s = self.draft_costs.estimate(num_rows, num_rows * length)
            if step_s is None or draft_s is None:
                continue
            if tokens / (step_s + draft_s) > best_rate:
                best, best_rate = length, tokens / (step_s + draft_s)
        return best

    def _find_price(self, num_rows: int, length: int) -> float:
        draft_s = self.draft_costs.estimate(num_rows, num_rows * length)
        step_s = self.costs.estimate(num_rows, num_rows)
        return draft_s / step_s if draft_s and step_s else 0.0


def _has_text(outcome: RowResult | int) -> bool:
    """True if the row's next draft is a text's, so that the model drafted nothing for it."""
    draft = () if isinstance(outcome, int) else outcome.draft
    return bool(draft) and draft[0].drafter not in MODEL_METHODS
