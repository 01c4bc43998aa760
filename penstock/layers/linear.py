"""A matrix product, whatever the weight's storage."""

from __future__ import annotations

from torch import Tensor

from penstock.layers.step import StepInputs
from penstock.quant.scheme import Scheme


class Linear:
    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        """x[T, C] → [T, O]."""
        return self.scheme.matmul(x)
