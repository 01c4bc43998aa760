"""Prompt lookup: what followed the last tokens where they stood before in the row's own text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.draft.drafter import Proposal, grade_match
from penstock.draft.text_index import MAX_MATCH, MIN_MATCH, Match, TextIndex
from penstock.sampling.row import RowState

MAX_INDEXED = 65_536  # tokens of the text before the first draft


class OwnText:
    """The row's last MAX_INDEXED tokens, indexed when a draft is first asked for."""

    def __init__(self, tokens: Sequence[int], min_match: int, max_match: int) -> None:
        self._index, self._min_match, self._max_match = TextIndex(), min_match, max_match
        self._waiting = list(tokens[-MAX_INDEXED:])
        self._singles: dict[int, int] = {}  # token → index after it where it stood last, but for the text's end

    def append(self, tokens: Sequence[int]) -> None:
        self._waiting += tokens

    def propose(self, most: int) -> Proposal | None:
        index = self._index
        if self._min_match < MIN_MATCH:
            self._note_singles()
        index.extend(self._waiting)
        self._waiting.clear()
        match = index.find(index.tokens, is_own=True, max_match=self._max_match) if self._max_match > 1 else None
        if match is None and self._min_match < MIN_MATCH and index.tokens[-1] in self._singles:
            match = Match(self._singles[index.tokens[-1]], 1)
        if match is None or match.length < self._min_match:
            return None
        return grade_match(index.read(match.after, most, is_own=True), match.length)

    def _note_singles(self) -> None:
        """Take note of the places of all tokens that another one follows."""
        for at, token in enumerate([*self._index.tokens[-1:], *self._waiting[:-1]] if self._waiting else ()):
            self._singles[token] = max(1, len(self._index)) + at


@dataclass(frozen=True)
class NgramDrafter:
    min_match: int = MIN_MATCH
    max_match: int = MAX_MATCH
    name: str = "ngram"

    def start(self, state: RowState) -> OwnText:
        return OwnText(state.tokens, self.min_match, self.max_match)

    def finish(self, state: RowState) -> None:
        pass
