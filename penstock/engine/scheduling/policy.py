"""Scheduling policies: the order of admission, and of preemption when memory runs out."""

from __future__ import annotations

from collections.abc import Callable

from penstock.engine.sequence import Sequence
from penstock.errors import InvalidConfig

PASSES = 16  # a sequence overtaken this often is overtaken no more
LOOK_AHEAD = 128  # waiting sequences whose cached prefix is looked up at each step

Match = Callable[[Sequence], int]


class Policy:
    """First come, first served."""

    displaces = False  # a waiting sequence may take the place of a running one of worse rank
    overtakes = False  # a later arrival may be admitted first, so that waiting must be bounded

    def rank(self, sequence: Sequence) -> tuple[int, ...]:
        """Running sequences of higher rank give way first."""
        return (sequence.number, sequence.sibling)

    def order(self, waiting: list[Sequence], match: Match) -> list[Sequence]:
        """Waiting sequences, the first to be admitted first."""
        return sorted(waiting, key=self.rank)


class Priority(Policy):
    """Lower `priority` first, even at a running sequence's expense; then first come, first served."""

    displaces = True

    def rank(self, sequence: Sequence) -> tuple[int, ...]:
        return (sequence.request.priority, sequence.number, sequence.sibling)


class LongestPrefix(Policy):
    """The longest cached prefix first."""

    overtakes = True

    def order(self, waiting: list[Sequence], match: Match) -> list[Sequence]:
        by_arrival = sorted(waiting, key=self.rank)
        near, far = by_arrival[:LOOK_AHEAD], by_arrival[LOOK_AHEAD:]
        near.sort(key=lambda sequence: (sequence.passed < PASSES, -match(sequence) if sequence.passed < PASSES else 0))
        return near + far


class ShortestFirst(Policy):
    """The fewest tokens to compute before the next output first."""

    overtakes = True

    def order(self, waiting: list[Sequence], match: Match) -> list[Sequence]:
        def key(sequence: Sequence) -> tuple[int, ...]:
            overdue = sequence.passed >= PASSES
            return (not overdue, 0 if overdue else len(sequence.tokens), *self.rank(sequence))

        return sorted(waiting, key=key)


POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": Policy,
    "priority": Priority,
    "lpm": LongestPrefix,
    "sjf": ShortestFirst,
}


def make_policy(name: str) -> Policy:
    if name not in POLICIES:
        raise InvalidConfig(f"scheduling_policy={name!r} is unknown: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]()
