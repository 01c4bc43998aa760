"""Jacobi decoding with a pool of n-grams, as in lookahead decoding: the model drafts for itself.

A step that verifies a draft computes the model's answer after every token of it. Those after a rejected token are wrong
for now, but often what the model says a place later: moved by one, they are the next draft. All answers of a step go
into a pool that belongs to the row, which is searched for the row's last tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from penstock.draft.drafter import Proposal, grade_match
from penstock.draft.text_index import END, MAX_MATCH, TextIndex
from penstock.sampling.row import RowState

MAX_POOL = 4096  # tokens
SEED, MOVED = 0, 1  # grades below those of a match
PRIORS = {SEED: 0.1, MOVED: 0.25}


class Trajectory:
    """The answers of one row's steps."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tail = list(tokens[-MAX_MATCH:])
        self._pool = TextIndex()
        self._latest: list[int] = []  # answers of the last step, which are not in the pool yet
        self._moved: list[int] = []  # those at rejected places: they may come next

    def append(self, tokens: Sequence[int]) -> None:
        self._tail = [*self._tail, *tokens][-MAX_MATCH:]
        for token in tokens:
            self._moved = self._moved[1:] if self._moved[:1] == [token] else []

    def watch(self, answers: Sequence[int], num_taken: int) -> None:
        """Take note of the model's answer at each place of a step; the first `num_taken` places count."""
        answers = list(takewhile(lambda token: token >= 0, answers))  # a device answers -1 where it cannot
        if len(self._pool) + len(self._latest) >= MAX_POOL:
            self._pool = TextIndex(self._pool.tokens[MAX_POOL // 2 :])
        self._pool.extend([*self._latest, END] if self._latest else ())
        self._latest = [*self._tail[:-num_taken][-1:], *answers]
        self._moved = answers[num_taken:]

    def propose(self, most: int) -> Proposal | None:
        match = self._pool.find(self._tail)
        found = self._pool.read(match.after, most) if match is not None else []
        if match is not None and found:
            return grade_match(found, match.length)
        grade = MOVED if self._moved else SEED
        return Proposal(self._moved[:most] or self._tail[-most:], grade, PRIORS[grade])


class LookaheadDrafter:
    name = "lookahead"

    def start(self, state: RowState) -> Trajectory:
        return Trajectory(state.tokens)

    def finish(self, state: RowState) -> None:
        pass
