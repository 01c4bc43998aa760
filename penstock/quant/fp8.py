"""8-bit floats on a GPU, one scale per output."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock import ops
from penstock.ops.fp8_product import FP8, fits, quantized
from penstock.quant.matrix import norm_parts
from penstock.quant.scheme import RmsNorm

VALUES = 1 << 24  # rounded at a time


class Fp8:
    """A weight [O, C] as codes and scales [O], its bias [O] in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if not fits(*weight.shape):
            raise ValueError(
                f"a weight of shape {tuple(weight.shape)} cannot be of 8-bit floats: both sizes must be multiples of 16"
            )
        self.num_out, self.num_in = weight.shape
        self.codes = torch.empty(weight.shape, dtype=FP8, device=weight.device)
        self.scale = torch.empty(self.num_out, device=weight.device)
        rows = max(1, VALUES // max(1, self.num_in))
        for first in range(0, self.num_out, rows):
            part = slice(first, first + rows)
            self.codes[part], self.scale[part] = quantized(weight[part])
        self.bias = None if bias is None else bias.float().contiguous()

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def matmul(
        self, x: Tensor, residual: Tensor | None = None, activation: str | None = None, norm: RmsNorm | None = None
    ) -> Tensor:
        return ops.fp8_product(x, self.codes, self.scale, self.bias, residual, activation, False, *norm_parts(norm))

    def gated(self, x: Tensor, activation: str, norm: RmsNorm | None = None) -> Tensor:
        return ops.fp8_product(x, self.codes, self.scale, self.bias, None, activation, True, *norm_parts(norm))

    def mlp(
        self, x: Tensor, activation: str, down: Fp8, residual: Tensor | None = None, norm: RmsNorm | None = None
    ) -> Tensor:
        """residual + down · gated(norm(x)), the rows between the two as 8-bit floats at once."""
        return ops.fp8_mlp(
            x,
            self.codes,
            self.scale,
            down.codes,
            down.scale,
            activation,
            self.bias,
            down.bias,
            residual,
            *norm_parts(norm),
        )

    def rows(self, ids: Tensor) -> Tensor:
        return self.codes.view(torch.uint8)[ids].view(FP8).float() * self.scale[ids, None]
