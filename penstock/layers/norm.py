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
    """Without a weight it can be part of a product only."""

    def __init__(self, weight: Tensor | None, eps: float, size: int = 0) -> None:
        self.weight, self.eps, self.size = weight, eps, size if weight is None else weight.shape[0]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.weight is None:
            raise ValueError("the norm's weight has become part of the product after it")
        return ops.rms_norm(x, self.weight, self.eps, residual)


class LayerNorm:
    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps, self.size = weight, bias, eps, weight.shape[0]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps, residual)
