"""8- and 4-bit integers on a GPU, with a scale for every 32 inputs, and in 4 bits a minimum."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock import ops
from penstock.ops.int_product import FEW, PANEL, TILES, empty_ints, num_panels, pack_codes, pack_scales
from penstock.quant.matrix import norm_parts
from penstock.quant.rounding import coded
from penstock.quant.scheme import RmsNorm

BITS = {"int8": 8, "int4": 4}


class Ints:
    """A weight [O, C] as words and scales, its bias [O] in float32: the weights that a CPU has of the same matrix, in
    another order.

    Norms are not folded into it: what is rounded together with a norm's weights is another matrix, and a worse one
    where these make up for inputs that are much larger than others.
    """

    row_counts = (2, *(rows + 1 for rows in TILES[:-1]), FEW + 1)

    def __init__(self, weight: Tensor, bias: Tensor | None, quantization: str, dtype: torch.dtype) -> None:
        self.num_out, self.num_in = weight.shape
        self.dtype = dtype  # of rows
        bits = BITS[quantization]
        self.words, self.scales = empty_ints(bits, self.num_out, self.num_in, weight.device)
        first = 0
        for codes, scales in coded(weight, quantization, PANEL):
            part = slice(first, first + num_panels(len(codes)))
            self.words[part], self.scales[part] = pack_codes(codes, bits), pack_scales(scales)
            first = part.stop
        self.bias = None if bias is None else bias.float().contiguous()

    @property
    def num_bytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def matmul(
        self, x: Tensor, residual: Tensor | None = None, activation: str | None = None, norm: RmsNorm | None = None
    ) -> Tensor:
        return ops.int_product(
            x, self.words, self.scales, self.num_out, self.bias, residual, activation, False, *norm_parts(norm)
        )

    def gated(self, x: Tensor, activation: str, norm: RmsNorm | None = None) -> Tensor:
        return ops.int_product(
            x, self.words, self.scales, self.num_out, self.bias, None, activation, True, *norm_parts(norm)
        )

    def rows(self, ids: Tensor) -> Tensor:
        return ops.int_rows(ids, self.words, self.scales, self.num_in, self.dtype)
