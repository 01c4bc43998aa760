"""FP8 (e4m3) on a GPU, one scale per output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.ops import OpTable
from penstock.ops.matmul.epilogue import Epilogue
from penstock.ops.matmul.fp8_product import FP8, can_store, quantize_fp8
from penstock.quant.dense import Matrix
from penstock.quant.scheme import StoredWeight

VALUES = 1 << 24  # rounded at a time


class Fp8(StoredWeight):
    """A weight as codes and scales [O]."""

    def __init__(self, ops: OpTable, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(ops, weight.shape, bias)
        if not can_store(*weight.shape):
            raise ValueError(
                f"a weight of shape {tuple(weight.shape)} cannot be of 8-bit floats: both sizes must be multiples of 16"
            )
        self.codes = torch.empty(weight.shape, dtype=FP8, device=weight.device)
        self.scale = torch.empty(self.num_out, device=weight.device)
        rows = max(1, VALUES // max(1, self.num_in))
        for first in range(0, self.num_out, rows):
            part = slice(first, first + rows)
            self.codes[part], self.scale[part] = quantize_fp8(weight[part])

    def matmul(self, x: Tensor) -> Tensor:
        return self.ops.fp8_product(x, self.codes, self.scale, Epilogue(self.bias))

    def grouped_matmul(self, x: Tensor, ids: Tensor, num_matrices: int) -> Tensor:
        return self.ops.grouped_fp8_product(x, self.codes, self.scale, ids, num_matrices, Epilogue(self.bias))

    def rows(self, ids: Tensor) -> Tensor:
        return self.codes.view(torch.uint8)[ids].view(FP8).float() * self.scale[ids, None]


def as_fp8(scheme: Any) -> Any:
    """Store a matrix as FP8 where its shape allows it."""
    if isinstance(scheme, Matrix) and can_store(scheme.num_out, scheme.num_in):
        return Fp8(scheme.ops, scheme.weight, scheme.bias)
    return scheme
