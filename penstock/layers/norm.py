"""Normalization over the last dimension."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock import ops


class Norm(Protocol):
    size: int

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x normed, added to the residual if there is one."""


class RmsNorm:
    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps, self.size = weight, eps, weight.shape[0]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, residual)


class LayerNorm:
    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps, self.size = weight, bias, eps, weight.shape[0]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps, residual)
