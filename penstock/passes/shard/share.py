"""A rank's share of what can be divided, and the part of a layer that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.models.cut import Cut, Link

By = Literal["out", "in"]
PANEL = 16  # outputs that are stored side by side


class Indivisible(Exception):
    """A number of things that do not divide into equal shares."""

    def __init__(self, things: str, count: int) -> None:
        super().__init__(f"{count} {things}")


@dataclass(frozen=True)
class RankShare:
    """Rank `rank` of `size`. Second products of a layer are cut `by` their outputs or their inputs."""

    rank: int
    size: int
    by: By
    expert_parallel: bool = False  # each rank has some whole experts, instead of a share of each

    def divide(self, things: str, count: int, multiple: int = 1) -> int:
        """Return the number of things that each rank gets, which must be a multiple."""
        if count % (self.size * multiple):
            raise Indivisible(things, count)
        return count // self.size

    def own(self, count: int) -> range:
        """Return this rank's of `count` things that divide."""
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def spread(self, count: int) -> tuple[int, ...]:
        """Return how many of `count` outputs each rank gets: whole panels, as evenly as these allow."""
        unit = PANEL if count // PANEL >= self.size else 1
        whole, left = divmod(count // unit, self.size)
        sizes = [unit * (whole + (rank < left)) for rank in range(self.size)]
        sizes[-1] += count % unit
        return tuple(sizes)

    def spread_own(self, count: int) -> range:
        sizes = self.spread(count)
        first = sum(sizes[: self.rank])
        return range(first, first + sizes[self.rank])

    def even(self, count: int) -> tuple[int, ...]:
        """Return the widths of what all ranks give, who give `count` each."""
        return (count,) * self.size


@dataclass(frozen=True)
class CutPart:
    """A rank's part of a mixer or FFN: its description, the cuts of its parameters and the links of its modules."""

    part: Any
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)


def shift(run: range, by: int) -> range:
    return range(run.start + by, run.stop + by)


def scale(run: range, size: int) -> range:
    """Return the rows of a run of things that have `size` rows each."""
    return range(run.start * size, run.stop * size)
