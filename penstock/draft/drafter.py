"""Drafters, and the part of each that belongs to one row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.sampling.row import RowState


class Proposal(NamedTuple):
    tokens: list[int]
    grade: int  # how much speaks for it; acceptance is counted per grade
    prior: float  # the chance of each token before any of this grade was judged


class RowDrafter(Protocol):
    """Follows one row."""

    def append(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that the row got."""

    def propose(self, most: int) -> Proposal | None:
        """Propose up to `most` tokens that may follow."""


class Drafter(Protocol):
    @property
    def name(self) -> str: ...

    def start(self, state: RowState) -> RowDrafter | None:
        """Follow a row from its tokens so far; None if there is nothing to propose for it."""

    def finish(self, state: RowState) -> None:
        """Take note of a row that has ended."""


PRIORS = (0.0, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.92)  # by grade; chat texts are below, copied ones above


def grade_match(tokens: list[int], length: int) -> Proposal:
    """Propose what followed a match, graded by its length: 1, 2, 3, 4, up to 7, up to 15, 16."""
    grade = length if length < 5 else length.bit_length() + 2
    return Proposal(tokens, grade, PRIORS[grade])
