"""A matrix product, whatever the weight's storage."""

from __future__ import annotations

from torch import Tensor

from penstock.layers.step import StepInputs
from penstock.quant.scheme import Scheme, StackScheme


class Linear:
    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        """x[T, C] → [T, O]."""
        return self.scheme.matmul(x)


class Stack:
    """E equal matrices [O, C]; each row names the ones it is multiplied by."""

    def __init__(self, scheme: StackScheme, num_matrices: int) -> None:
        self.scheme, self.num_matrices = scheme, num_matrices

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        """x[T, C], or x[T, K, C] with a row for each of ids[T, K] → [T, K, O]."""
        return self.scheme.grouped_matmul(x, ids, self.num_matrices)
