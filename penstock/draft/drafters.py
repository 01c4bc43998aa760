"""All drafters of an engine, and their lines for one row."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config.speculation import MODEL_METHODS, SpeculativeConfig
from penstock.draft.acceptance import Acceptance, Share
from penstock.draft.drafter import Drafter, Proposal, RowDrafter
from penstock.draft.grammar import GrammarDrafter
from penstock.draft.lookahead import LookaheadDrafter, Trajectory
from penstock.draft.merge import merge_lines
from penstock.draft.ngram import NgramDrafter
from penstock.draft.prediction import PredictionDrafter
from penstock.draft.suffix import SuffixDrafter
from penstock.engine.plan import Draft
from penstock.sampling.row import RowState
from penstock.types.speculation import AUTO, PREDICTION, SpeculationParams, count_most

_log = logging.getLogger(__name__)
FAILED = "a drafter failed; the request goes on without drafts"
ROW_WEIGHT = 8.0  # draft tokens that the engine's share counts for beside the row's own
MAX_ROW_JUDGED = 64.0


@dataclass(slots=True)
class Followed:
    """One drafter's part of a row. `pending` is the proposal that is being judged by the tokens that come, whether or
    not it was verified; `at` is the position of its first token."""

    drafter: Drafter
    part: RowDrafter
    share: Share
    pending: Proposal | None = None
    at: int = 0
    num_right: int = 0


class RowDrafts:
    """The drafters of one row. Catches up with the row's tokens when it is asked, so that it costs nothing while
    speculation does not pay."""

    def __init__(
        self, state: RowState, drafters: Sequence[Drafter], acceptance: Acceptance, merges: bool = False
    ) -> None:
        self._state, self._acceptance, self._merges = state, acceptance, merges
        self._num_known = len(state.tokens)
        self._most = count_most(state.request.sampling.speculation)
        parts = [(drafter, drafter.start(state)) for drafter in drafters]
        self._followed = [Followed(drafter, part, Share()) for drafter, part in parts if part is not None]
        self._trajectories = [part for _, part in parts if isinstance(part, Trajectory)]

    def propose(self, most: int, min_chance: float) -> tuple[Draft, ...]:
        """Return the line of the drafter that promises most, or all lines merged into a tree, as far as each token is
        wanted: its chance, with all before it, is at least `min_chance`."""
        state = self._state
        if state.has_stopped or state.num_generated >= state.request.max_tokens:
            self._followed = []  # the row may wait long for its next sequence
            return ()
        self._catch_up()
        most = min(most, self._most, state.request.max_tokens - state.num_generated - 1)
        lines: list[tuple[float, tuple[Draft, ...]]] = []
        for one in self._followed:
            proposal = one.part.propose(most) if most > 0 else None
            if proposal is None or not proposal.tokens:
                continue
            if one.pending is None:
                one.pending, one.at, one.num_right = proposal, self._num_known, 0
            line, value = self._estimate(one, proposal, min_chance)
            if line:
                lines.append((value, line))
        if self._merges:
            return merge_lines([line for _, line in lines])
        return max(lines, key=lambda one: one[0])[1] if lines else ()

    def watch(self, answers: Sequence[int], num_taken: int) -> None:
        """Take note of the model's answer at each place of a draft, of which the row took the first `num_taken`."""
        if self._trajectories:
            self._catch_up()
            for part in self._trajectories:
                part.watch(answers, num_taken)

    def _catch_up(self) -> None:
        """Judge pending proposals by the tokens that have come, and tell the drafters of them."""
        new = self._state.tokens[self._num_known :]
        self._num_known = len(self._state.tokens)
        for one in self._followed:
            self._judge(one)
            one.part.append(new)

    def _judge(self, one: Followed) -> None:
        """Compare the pending proposal with the tokens that have come."""
        if one.pending is None:
            return
        tokens, (line, grade, _) = self._state.tokens, one.pending
        while one.num_right < len(line) and one.at + one.num_right < len(tokens):
            is_right = line[one.num_right] == tokens[one.at + one.num_right]
            self._acceptance.add(one.drafter.name, grade, one.num_right, is_right)
            one.share.add(is_right, MAX_ROW_JUDGED)
            one.num_right += 1
            if not is_right:
                break
        else:
            if one.num_right < len(line):
                return  # more of it may come true
        one.pending = None

    def _estimate(self, one: Followed, proposal: Proposal, min_chance: float) -> tuple[tuple[Draft, ...], float]:
        """Return the wanted part of a line and the tokens expected of it."""
        name, path, value = one.drafter.name, 1.0, 0.0
        line = []
        for place, token in enumerate(proposal.tokens):
            chance = self._acceptance.chance(name, proposal.grade, place, proposal.prior)
            chance = one.share.estimate(chance, ROW_WEIGHT)
            path *= chance
            if path < min_chance:
                break
            value += path
            line.append(Draft(token, place - 1, chance, name))
        return tuple(line), value


def make_drafters(config: SpeculativeConfig | None, others: Sequence[Drafter] = ()) -> Drafters | None:
    """Make the drafters of a method, and that of predicted outputs, beside `others`; None if nothing is to be
    drafted."""
    if config is None:
        return None
    ngram = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    suffix = SuffixDrafter(max_answers=config.suffix_decoding_max_cached_requests)
    texts: list[Drafter] = [GrammarDrafter(), ngram, suffix]
    drafters: dict[str, list[Drafter]] = {
        "auto": texts,
        "ngram": [ngram],
        "suffix": [suffix],
        "lookahead": [LookaheadDrafter()],
        **dict.fromkeys(MODEL_METHODS, texts),  # what they draft is there before the model has begun
    }
    chosen = [PredictionDrafter(), *others, *drafters[config.method]]
    return Drafters(chosen, config.num_speculative_tokens, config.tree)


class Drafters:
    """Starts and ends the drafters of rows."""

    def __init__(self, drafters: Sequence[Drafter], max_tokens: int, merges: bool = False) -> None:
        self.drafters, self.max_tokens = tuple(drafters), max_tokens  # of one line
        self.merges = merges  # the lines of all drafters into a tree
        self.acceptance = Acceptance()

    def start(self, state: RowState) -> RowDrafts | None:
        """Follow a row; None for a beam or a request that wants no drafts, or if a drafter fails."""
        asked = state.request.sampling.speculation
        if state.request.beam is not None or asked is False:
            return None
        try:
            return RowDrafts(state, self._choose(asked), self.acceptance, self.merges)
        except Exception:
            _log.exception(FAILED)
            return None

    def _choose(self, asked: SpeculationParams | bool | None) -> Sequence[Drafter]:
        """Return the drafters of a request that may name one; its own prediction is used with each."""
        method = asked.method if isinstance(asked, SpeculationParams) else None
        if method in (None, AUTO):
            return self.drafters
        return [drafter for drafter in self.drafters if drafter.name in (method, PREDICTION)]

    def finish(self, state: RowState) -> None:
        """Let drafters learn from a row that has ended."""
        if state.request.beam is not None:
            return
        try:
            for drafter in self.drafters:
                drafter.finish(state)
        except Exception:
            _log.exception(FAILED)
