"""Jump forward: tokens that a grammar leaves no choice about."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.draft.drafter import Proposal
from penstock.sampling.row import RowState

PRIOR = 0.95  # a budget that runs short, or a mask of the request's, may choose otherwise


class ForcedText:
    def __init__(self, state: RowState) -> None:
        self._state = state

    def append(self, tokens: Sequence[int]) -> None:
        pass  # the row's guide has advanced with them

    def propose(self, most: int) -> Proposal | None:
        guide = self._state.guide
        tokens = guide.forced_tokens() if guide is not None and self._state.failure is None else ()
        return Proposal(list(tokens[:most]), 0, PRIOR) if tokens else None


class GrammarDrafter:
    name = "grammar"

    def start(self, state: RowState) -> ForcedText | None:
        return ForcedText(state) if state.guide is not None else None

    def finish(self, state: RowState) -> None:
        pass
