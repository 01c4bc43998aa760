"""8-bit floats on a GPU, one scale per output."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock import ops
from penstock.ops.fp8_product import FP8, quantized
from penstock.quant.matrix import norm_parts
from penstock.quant.scheme import RmsNorm

ROWS = 4096              # rounded at a time


class Fp8:
    """A weight [O, C] as codes and scales [O], its bias [O] in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.num_out, self.num_in = weight.shape
        self.codes = torch.empty(weight.shape, dtype=FP8, device=weight.device)
        self.scale = torch.empty(self.num_out, device=weight.device)
        for first in range(0, self.num_out, ROWS):
            part = slice(first, first + ROWS)
            self.codes[part], self.scale[part] = quantized(weight[part])
        self.bias = None if bias is None else bias.float().contiguous()

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def matmul(self, x: Tensor, residual: Tensor | None = None, activation: str | None = None,
               norm: RmsNorm | None = None) -> Tensor:
        return ops.fp8_product(x, self.codes, self.scale, self.bias, residual, activation, False, *norm_parts(norm))

    def gated(self, x: Tensor, activation: str, norm: RmsNorm | None = None) -> Tensor:
        return ops.fp8_product(x, self.codes, self.scale, self.bias, None, activation, True, *norm_parts(norm))

    def rows(self, ids: Tensor) -> Tensor:
        return (self.codes[ids].float() * self.scale[ids, None]).to(torch.bfloat16)
