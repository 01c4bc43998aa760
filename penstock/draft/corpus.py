"""Drafts from a text that the operator gave: the tokens that followed the row's last ones there."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.draft.drafter import Proposal, grade_match
from penstock.draft.text_index import MAX_MATCH, TextIndex
from penstock.sampling.row import RowState


class CorpusFollower:
    def __init__(self, index: TextIndex, tokens: Sequence[int]) -> None:
        self._index, self._tail = index, list(tokens[-MAX_MATCH:])

    def append(self, tokens: Sequence[int]) -> None:
        self._tail = [*self._tail, *tokens][-MAX_MATCH:]

    def propose(self, most: int) -> Proposal | None:
        match = self._index.find(self._tail)
        tokens = self._index.read(match.after, most) if match is not None else []
        return grade_match(tokens, match.length) if match is not None and tokens else None


class CorpusDrafter:
    """Shared by all requests: its text is the operator's."""

    name = "corpus"

    def __init__(self, tokens: Sequence[int]) -> None:
        self._index = TextIndex(tokens)

    def start(self, state: RowState) -> CorpusFollower:
        return CorpusFollower(self._index, state.tokens)

    def finish(self, state: RowState) -> None:
        pass
