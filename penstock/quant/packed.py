"""Integer codes with scales, multiplied without being widened first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock import ops
from penstock.ops.cpu.packed import pack_into
from penstock.quant.gguf import GGML_TYPES
from penstock.quant.scheme import RmsNorm


@dataclass(frozen=True)
class Stored:
    """A matrix as a file of quantized blocks holds it: one row of bytes per output."""

    ggml_type: int
    raw: np.ndarray  # [O, bytes] uint8
    width: int
    order: np.ndarray | None = None  # int64: the rows to take, in turn; all if absent
    transposed: bool = False  # the checkpoint's own matrix is [C, O]

    @property
    def num_out(self) -> int:
        return len(self.raw) if self.order is None else len(self.order)

    @property
    def format(self) -> ops.Format | None:
        """How it is packed; None if it cannot be."""
        return ops.FORMATS.get(GGML_TYPES[self.ggml_type].name)


def pack(stored: Sequence[Stored]) -> ops.PackedWeight:
    """Matrices of one type on top of each other."""
    format = stored[0].format
    if format is None or any(part.ggml_type != stored[0].ggml_type for part in stored):
        raise ValueError(f"types {[part.ggml_type for part in stored]} cannot be packed together")
    weight = ops.PackedWeight.empty(format, sum(part.num_out for part in stored), stored[0].width)
    first = 0
    for part in stored:
        first += pack_into(weight, first, part.ggml_type, part.raw, part.order)
    return weight


class Packed:
    """A weight [O, C] in one or more packed parts, its bias [O] in float32.

    Activations are rounded to integers of `x_bits` bits; with 0 the weights are widened to float32.
    """

    def __init__(self, parts: Sequence[ops.PackedWeight], bias: Tensor | None = None, x_bits: int = 8) -> None:
        self.parts = tuple(parts)
        self.num_out, self.num_in = sum(part.num_out for part in parts), parts[0].width
        self.bias = None if bias is None else bias.float().contiguous()
        self.x_bits = x_bits

    @classmethod
    def from_stored(cls, stored: Sequence[Stored], bias: Tensor | None, x_bits: int) -> Packed:
        """Neighbours of one type become one part."""
        runs: list[list[Stored]] = []
        for part in stored:
            if runs and runs[-1][0].ggml_type == part.ggml_type:
                runs[-1].append(part)
            else:
                runs.append([part])
        return cls([pack(run) for run in runs], bias, x_bits)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts) + (0 if self.bias is None else self.bias.nbytes)

    def matmul(
        self, x: Tensor, residual: Tensor | None = None, activation: str | None = None, norm: RmsNorm | None = None
    ) -> Tensor:
        return self._product(x, residual, activation, False, norm)

    def gated(self, x: Tensor, activation: str, norm: RmsNorm | None = None) -> Tensor:
        if len(self.parts) > 1 or self.num_out % (2 * ops.PANEL):  # a gate and its value lie in unlike panels
            return ops.gated_activation(self.matmul(x, norm=norm), activation)
        return self._product(x, None, activation, True, norm)

    def _product(
        self, x: Tensor, residual: Tensor | None, activation: str | None, gated: bool, norm: RmsNorm | None
    ) -> Tensor:
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return ops.packed_linear(x, self.parts, self.x_bits, self.bias, residual, activation, gated, weight, eps)

    def rows(self, ids: Tensor) -> Tensor:
        if len(self.parts) == 1:
            return ops.packed_rows(ids, self.parts[0])
        return torch.cat([part.unpacked() for part in self.parts])[ids]
