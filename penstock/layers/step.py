"""What layers read of a step and of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock import ops
from penstock.ops import Work


class LayerCache(Protocol):
    """One layer's keys [N, K, D, P] and values [N, K, P, D], and the cache group whose slots and table address them.

    An int8 cache has scales [N, K, P] for each.
    """

    @property
    def k(self) -> Tensor: ...
    @property
    def v(self) -> Tensor: ...
    @property
    def k_scale(self) -> Tensor | None: ...
    @property
    def v_scale(self) -> Tensor | None: ...
    @property
    def group(self) -> int: ...


class Step(Protocol):
    @property
    def ids(self) -> Tensor: ...  # [T] int64
    @property
    def positions(self) -> Tensor: ...  # [T] int64
    @property
    def slots(self) -> list[Tensor]: ...  # per group [T] int64
    @property
    def tables(self) -> list[Tensor]: ...  # per group [S, B] int32
    @property
    def query_start(self) -> Tensor: ...  # [S + 1] int32
    @property
    def lengths(self) -> Tensor: ...  # [S] int32
    @property
    def work(self) -> Work | None: ...


@dataclass(frozen=True)
class Ends:
    """The tokens at[M] of a step that something is asked of: in the last layer the others leave keys and values only.
    `step` is of those tokens, each the only query of a sequence that ends with it."""

    at: Tensor
    step: Step

    def of(self, x: Tensor) -> Tensor:
        """Their rows of x[T, ...]."""
        return ops.gather(self.at, x.flatten(1)).view(-1, *x.shape[1:])
