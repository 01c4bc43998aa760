"""The tensors of a step that layers read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from penstock.ops import Tail, Work


class StepInputs(Protocol):
    @property
    def ids(self) -> Tensor: ...  # [T] int64
    @property
    def positions(self) -> Tensor: ...  # [T] int64
    @property
    def places(self) -> Tensor: ...  # [T] int64: where states lie in the block tables
    @property
    def slots(self) -> list[Any]: ...  # per group [T] int64; None for a recurrent group
    @property
    def tables(self) -> list[Tensor]: ...  # per group [S, B] int32; recurrent: B blocks of the state
    @property
    def query_start(self) -> Tensor: ...  # [S + 1] int32
    @property
    def lengths(self) -> Tensor: ...  # [S] int32
    @property
    def work(self) -> Work | None: ...
    @property
    def tail(self) -> Tail | None: ...  # paths of draft tokens that form trees
    @property
    def adapters(self) -> Any: ...  # [T] int32: the slot of each token's adapters, -1; None: no row has any
    @property
    def ends(self) -> Ends | None: ...  # the tokens that logits are wanted of; None: not known


@dataclass(frozen=True)
class Ends:
    """The tokens at[M] that need logits, and a step of them alone, each as the only query of its sequence."""

    at: Tensor
    step: StepInputs
