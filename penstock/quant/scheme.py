"""What a stored weight must be able to do, whatever its format."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RmsNorm(Protocol):
    """A norm that a product may make part of its own work."""

    weight: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor: ...


class Scheme(Protocol):
    """One [O, C] matrix in some storage format, with its bias if it has one."""

    num_out: int
    num_in: int

    @property
    def num_bytes(self) -> int: ...

    def matmul(
        self, x: Tensor, residual: Tensor | None = None, activation: str | None = None, norm: RmsNorm | None = None
    ) -> Tensor:
        """residual + act(norm(x)[T, C] · weightᵀ + bias) → [T, O]"""

    def gated(self, x: Tensor, activation: str, norm: RmsNorm | None = None) -> Tensor:
        """act(first half) · second half of norm(x)[T, C] · weightᵀ + bias → [T, O/2]"""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ids[T] of the matrix → [T, C] float32"""
