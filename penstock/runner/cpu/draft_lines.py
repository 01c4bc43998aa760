"""Draft tokens of a drafting model, row by row: how they are drawn, what they are worth, how they turned out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from penstock.draft.acceptance import Acceptance, Share
from penstock.draft.drafters import MAX_ROW_JUDGED, ROW_WEIGHT
from penstock.engine.draft_tree import compute_path_chances
from penstock.engine.plan import Draft, Plan, Row, RowResult
from penstock.runner.rows import RunningRow, RunningRows
from penstock.sampling.logits import Array, UnusableLogits
from penstock.sampling.rare.chain import find_shares
from penstock.sampling.reject import can_reject, draw_draft, verify_by_rejection
from penstock.sampling.row import Chooser, RowState
from penstock.sampling.sampler import Sampled, Sampler
from penstock.types.speculation import AUTO, SpeculationParams, count_most

NUM_GRADES = 8  # a draft token's grade is its probability in the drafting model, in eighths
FIXED_GRADE = 6  # with rejection sampling, where what becomes of a token must not depend on it
FIRST_WORTH = 1.0  # tokens expected of a line, before one was drawn
WORTH_STEP = 0.1  # how much one line changes the mean worth of lines
_log = logging.getLogger(__name__)


class DraftingRunner(Protocol):
    """A device's runner, as far as drawing draft tokens is concerned."""

    model: Any
    rows: RunningRows
    sampler: Sampler


@dataclass(slots=True)
class NetRow:
    """A drafting model's part of one row: it has computed the first `drafted` positions, then fed itself `ahead`."""

    drafted: int = 0
    marked: int = 0  # positions whose blocks are known to be filled
    ahead: list[int] = field(default_factory=list)
    pending: list[tuple[int, int, int]] = field(default_factory=list)  # the last draft: token, grade, parent of each
    at: int = 0  # position of its first token
    share: Share = field(default_factory=Share)
    drawn_from: list[Array] = field(default_factory=list)  # with rejection sampling: probabilities [V] at each place


class Judge:
    """Chances of draft tokens: what the drafter has shown, per grade and place, and per row."""

    def __init__(self, name: str, acceptance: Acceptance) -> None:
        self.name, self._acceptance = name, acceptance

    def estimate(self, own: NetRow, grade: int, place: int) -> float:
        """Estimate a token's chance. A grade from NUM_GRADES on is of a node's further children."""
        prior = (grade % NUM_GRADES + 0.5) / NUM_GRADES
        chance = self._acceptance.chance(self.name, grade, place, prior)
        return own.share.estimate(chance, ROW_WEIGHT) if grade < NUM_GRADES else chance

    def judge(self, own: NetRow, tokens: Sequence[int]) -> None:
        """Compare the last draft with the tokens that have come since, whether or not it was verified."""
        parent: int | None = -1
        for place, come in enumerate(tokens[own.at :] if own.pending else ()):
            children = [i for i, (_, _, above) in enumerate(own.pending) if above == parent]
            parent = None
            for i in children:
                token, grade, _ = own.pending[i]
                is_right = token == come
                self._acceptance.add(self.name, grade, place, is_right)
                if grade < NUM_GRADES:
                    own.share.add(is_right, MAX_ROW_JUDGED)
                parent = i if is_right else parent
            if parent is None:
                break
        own.pending = []


@dataclass(slots=True)
class Line:
    """A row's draft in the making."""

    row: Row
    device: RunningRow
    own: NetRow
    result: RowResult
    most: int
    length: int  # known tokens
    drafts: list[Draft] = field(default_factory=list)
    path: float = 1.0
    worth: float = 0.0  # tokens expected of it
    paths: list[float] = field(default_factory=list)  # of a tree: each node's chance with all before it
    mus: list[float | None] = field(default_factory=list)  # of a tree: mirostat's state after each node
    computed: list[int] = field(default_factory=list)  # of a tree: the nodes that the model has read, in its order


def count_wanted(state: RowState, result: RowResult, ahead: int) -> int:
    """Count the tokens to draft after a row's result; 0 if its answer ends here."""
    if not result.tokens or result.error or result.complete or state.has_stopped or state.request.beam is not None:
        return 0
    asked = state.request.sampling.speculation
    if isinstance(asked, SpeculationParams) and asked.method not in (None, AUTO):
        return 0  # from texts alone
    return max(0, min(ahead, count_most(asked), state.request.max_tokens - state.num_generated - 1))


class LineMaker:
    """Draws draft tokens as the target would draw them: with the row's own counter, penalties and grammar."""

    rejects = False  # draft tokens are verified by rejection sampling

    def __init__(self, runner: DraftingRunner, name: str, target_ids: np.ndarray | None, vocab_size: int) -> None:
        assert runner.rows.drafters is not None
        self.judge = Judge(name, runner.rows.drafters.acceptance)
        self._sampler, self._target_ids, self._vocab_size = runner.sampler, target_ids, vocab_size
        self.mean_worth = FIRST_WORTH  # tokens expected of a line

    def begin(
        self, row: Row, device: RunningRow, own: NetRow, result: RowResult, ahead: int, price: float = 0.0
    ) -> Line | None:
        """Begin a line for a row; None if it has no drafts, wants none, or a draft from a text is worth more: the
        model's costs `price` tokens, and that one is there."""
        state = device.state
        self.judge.judge(own, state.tokens)
        own.drawn_from = []
        most = count_wanted(state, result, ahead) if device.drafts is not None else 0
        if not most or result.draft and sum(compute_path_chances(result.draft)) >= self._estimate(own, most) - price:
            return None
        return Line(row, device, own, result, most, len(state.tokens))

    def _estimate(self, own: NetRow, most: int) -> float:
        """Return the tokens expected of the row's next line: as many as of lines so far, but of no more than the row's
        own acceptance lets hope for."""
        chance = own.share.estimate(1.0, ROW_WEIGHT)
        return min(self.mean_worth, sum(chance**place for place in range(1, most + 1)))

    def extend(self, line: Line, logits: Array, likeliest: int, min_chance: float) -> bool:
        """Draw the line's next token from logits [V]; False if the line ends here."""
        logits, likeliest = self.map_logits(logits, likeliest)
        drawn = self.draw(line, logits, likeliest)
        if drawn is None or not np.isfinite(logits[drawn[0]]):
            return False
        share = None if self.rejects else self.find_shares(logits, likeliest, [drawn[0]])[drawn[0]]
        return self.keep(line, drawn, share, min_chance)

    def keep(self, line: Line, drawn: tuple[int, float | None], share: float | None, min_chance: float) -> bool:
        """Add a token with its share of the drafting model's probability to the line; False if the line ends here."""
        state, place = line.device.state, len(line.drafts)
        grade = FIXED_GRADE if share is None else min(NUM_GRADES - 1, int(NUM_GRADES * share))
        chance = self.judge.estimate(line.own, grade, place)
        line.path *= chance
        if line.path < min_chance:
            return False
        line.worth += line.path
        line.own.pending.append((drawn[0], grade, place - 1))
        line.drafts.append(Draft(drawn[0], place - 1, chance, self.judge.name))
        state.append(*drawn)
        return len(line.drafts) < line.most and not state.is_finished and not state.has_stopped

    def map_logits(self, logits: Array, likeliest: int) -> tuple[Array, int]:
        """Give logits the target's ids."""
        if self._target_ids is None:
            return logits, likeliest
        whole = np.full(self._vocab_size, -np.inf, dtype=np.float32)
        shared = self._target_ids >= 0
        whole[self._target_ids[shared]] = logits[shared]
        return whole, int(whole.argmax())

    def find_shares(self, logits: Array, likeliest: int, tokens: Sequence[int]) -> dict[int, float]:
        """Return the share of each of `tokens` in the softmax of logits [V]."""
        return self._sampler.probabilities(logits, likeliest, tokens)

    def draw(self, line: Line, logits: Array, likeliest: int) -> tuple[int, float | None] | None:
        state = line.device.state
        if state.chooser is Chooser.ARGMAX:
            return likeliest, None
        if not self.rejects or not can_reject(state):
            return self._sampler.propose(logits, state)
        try:
            shares = find_shares(logits, state)
        except UnusableLogits:
            return None
        line.own.drawn_from.append(shares)
        return draw_draft(shares, state), None

    def verify(self, row: Row, device: RunningRow, logits: Array) -> list[Sampled] | None:
        """Verify a line that was drawn for rejection sampling; None if it was not."""
        own, state = device.net, device.state
        if not self.rejects or not row.draft or own.at != len(state.tokens) or len(own.drawn_from) < len(row.draft):
            return None
        if any(draft.token != token for draft, (token, _, _) in zip(row.draft, own.pending)):
            return None
        return verify_by_rejection(logits, state, row.draft, own.drawn_from)

    def end(self, lines: Sequence[Line]) -> None:
        """Put the rows back to their known tokens, and hand over the drafts."""
        for line in lines:
            line.device.state.truncate(line.length)
            line.own.at = line.length
            self.mean_worth += WORTH_STEP * (line.worth - self.mean_worth)
            if line.drafts:
                line.result.draft = tuple(line.drafts)


class LineDrafter:
    """A drafter within the step. If it fails, its drafts are lost, no answer is."""

    def __init__(self, runner: DraftingRunner, name: str, target_ids: np.ndarray | None) -> None:
        self.lines = LineMaker(runner, name, target_ids, runner.model.spec.vocab_size)
        self._has_failed = False

    def verify(self, row: Row, device: RunningRow, logits: Array) -> list[Sampled] | None:
        return self.lines.verify(row, device, logits)

    def draft(self, plan: Plan, rows: Sequence[RunningRow], computed: Any, results: Sequence[RowResult]) -> None:
        if self._has_failed:
            return
        lines: list[Line] = []
        try:
            self.fill(plan, rows, computed, results, lines)
        except Exception:
            self._has_failed = True
            for line in lines:
                line.drafts = []
            _log.exception("the %s drafter failed; answers go on without its drafts", self.lines.judge.name)
        finally:
            self.lines.end(lines)

    def fill(
        self, plan: Plan, rows: Sequence[RunningRow], computed: Any, results: Sequence[RowResult], lines: list[Line]
    ) -> None:
        """Make lines of draft tokens for the rows that want some; those begun are in `lines` whatever happens.
        `computed` is what the device kept of the step."""
        raise NotImplementedError
