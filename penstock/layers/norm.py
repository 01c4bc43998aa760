"""Normalization over the last dimension."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.ops import OpTable


class Norm(Protocol):
    size: int

    def __call__(self, x: Tensor) -> Tensor: ...


class RmsNorm:
    def __init__(self, ops: OpTable, weight: Tensor, eps: float) -> None:
        self.ops, self.weight, self.eps, self.size = ops, weight, eps, weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


class LayerNorm:
    def __init__(self, ops: OpTable, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.ops, self.weight, self.bias, self.eps, self.size = ops, weight, bias, eps, weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)
