"""Shares of draft tokens that came true, so that a drafter's chances are those it has shown."""

from __future__ import annotations

from collections.abc import Hashable

PRIOR_WEIGHT = 4.0  # draft tokens that a prior counts for
MAX_JUDGED = 256.0  # older ones fade
MAX_PLACE = 7


class Share:
    """Accepted of judged draft tokens, recent ones counting more."""

    __slots__ = ("accepted", "judged")

    def __init__(self) -> None:
        self.accepted = self.judged = 0.0

    def add(self, is_accepted: bool, most: float) -> None:
        self.accepted += is_accepted
        self.judged += 1
        if self.judged > most:
            self.accepted /= 2
            self.judged /= 2

    def estimate(self, prior: float, weight: float) -> float:
        return (prior * weight + self.accepted) / (weight + self.judged)


class Acceptance:
    """Shares by drafter, grade and place in the line, given that the places before were right."""

    def __init__(self) -> None:
        self._shares: dict[Hashable, Share] = {}

    def add(self, drafter: str, grade: int, place: int, is_accepted: bool) -> None:
        key = drafter, grade, min(place, MAX_PLACE)
        share = self._shares.get(key)
        if share is None:
            share = self._shares[key] = Share()
        share.add(is_accepted, MAX_JUDGED)

    def chance(self, drafter: str, grade: int, place: int, prior: float) -> float:
        share = self._shares.get((drafter, grade, min(place, MAX_PLACE)))
        return prior if share is None else share.estimate(prior, PRIOR_WEIGHT)
