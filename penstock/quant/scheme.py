"""What a stored weight must be able to do, whatever its format."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Scheme(Protocol):
    """One [O, C] matrix in some storage format, with its bias if it has one."""

    num_out: int
    num_in: int

    @property
    def num_bytes(self) -> int: ...

    def matmul(self, x: Tensor, residual: Tensor | None = None, activation: str | None = None) -> Tensor:
        """residual + act(x[T, C] · weightᵀ + bias) → [T, O]"""

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """act(first half) · second half of x[T, C] · weightᵀ + bias → [T, O/2]"""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ids[T] of the matrix → [T, C] float32"""
