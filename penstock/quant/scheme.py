"""The interface of a stored weight, whatever its format, and what all formats share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from penstock.ops import OpTable


class Scheme(Protocol):
    """One [O, C] matrix in some storage format, with its bias if it has one."""

    num_out: int
    num_in: int

    @property
    def num_bytes(self) -> int: ...

    def matmul(self, x: Tensor) -> Tensor:
        """x[T, C] · weightᵀ + bias → [T, O]"""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ids[T] of the matrix → [T, C]"""


class StackScheme(Scheme, Protocol):
    """A stack of E equal matrices [O, C], held as one [E · O, C]."""

    def grouped_matmul(self, x: Tensor, ids: Tensor, num_matrices: int) -> Tensor:
        """x[T, C] or x[T, K, C] · stack[ids[T, K]]ᵀ + bias → [T, K, O]"""


class StoredWeight:
    """A weight [O, C], its bias [O] in float32. Its tensors are attributes of the scheme."""

    def __init__(self, ops: OpTable, shape: Sequence[int], bias: Tensor | None) -> None:
        self.ops = ops
        self.num_out, self.num_in = shape
        self.bias = None if bias is None else bias.float().contiguous()

    @property
    def num_bytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))
