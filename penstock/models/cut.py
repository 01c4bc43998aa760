"""A model's parameters as one of several ranks holds them, as plain data: rows and columns of the whole ones.

`penstock.passes.shard` makes these of a spec. Loading reads no more than they say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # configs are read without torch
    from torch import Tensor

    from penstock.models.spec import ModelSpec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """A rank's part of a parameter: runs of rows, one after the other, and of these some columns."""

    rows: tuple[range, ...] | None = None  # None: all
    columns: range | None = None
    is_zero: bool = False  # a bias that another rank adds

    @property
    def num_rows(self) -> int | None:
        return None if self.rows is None else sum(map(len, self.rows))

    def shape(self, whole: Shape) -> Shape:
        rows, columns = self.num_rows, self.columns
        cut = (whole[0] if rows is None else rows, *whole[1:])
        return cut if columns is None else (cut[0], len(columns), *cut[2:])

    def take(self, whole: Tensor) -> Tensor:
        """Return the part: a view where it is one run of rows."""
        import torch

        if self.is_zero:
            return torch.zeros_like(whole)
        if self.columns is not None:
            whole = whole[:, self.columns.start : self.columns.stop]
        if self.rows is None:
            return whole
        parts = [whole[run.start : run.stop] for run in self.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def runs_within(self, first: int, count: int) -> list[range]:
        """Return the rows of a part that is rows [first, first + count) of the whole, counted from its first."""
        if self.rows is None:
            return [range(count)]
        clipped = (range(max(run.start - first, 0), min(run.stop - first, count)) for run in self.rows)
        return [run for run in clipped if len(run)]


class Link(Protocol):
    """An exchange with the other ranks, around a part of a layer."""

    @property
    def keeps_outputs(self) -> bool:
        """True if what comes out of the product itself is the rank's own, or its part of a sum."""

    def wrap(self, part: Any, mesh: Any, ops: Any) -> Any:
        """Return what is called in place of the part."""


@dataclass(frozen=True)
class Cuts:
    """One rank's part of a model. What is not named is whole on every rank."""

    whole: ModelSpec
    rank: int
    size: int
    parameters: Mapping[str, Cut]
    num_matrices: Mapping[str, int]  # of the stacks among them
    links: Mapping[str, Link]  # by the module's name: layers.0.attention.out

    def shapes(self) -> dict[str, Shape]:
        """Return every parameter's shape here."""
        whole, cuts = self.whole.parameters(), self.parameters
        return {name: cuts[name].shape(shape) if name in cuts else shape for name, shape in whole.items()}

    def find_adapter_cut(self, linear: str) -> Cut | None:
        """Return how a low-rank addition to a linear is cut: rows of b, columns of a; None if it is added whole."""
        link = self.links.get(linear)
        return self.parameters.get(f"{linear}.weight") if link is None or link.keeps_outputs else None
