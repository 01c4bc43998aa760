"""Normalization over the last dimension."""

from __future__ import annotations

from typing import Protocol

import torch
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


class GroupedRmsNorm:
    """Each of `num_groups` equal parts of x by itself, as Mamba-2 norms what its groups of heads made."""

    def __init__(self, ops: OpTable, weight: Tensor, eps: float, num_groups: int) -> None:
        self.ops, self.eps, self.size = ops, eps, weight.shape[0]
        self.weights = weight.chunk(num_groups)

    def __call__(self, x: Tensor) -> Tensor:
        parts = x.chunk(len(self.weights), dim=1)
        normed = [self.ops.rms_norm(part.contiguous(), weight, self.eps) for part, weight in zip(parts, self.weights)]
        return torch.cat(normed, dim=1)
