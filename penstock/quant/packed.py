"""Integer codes with scales, multiplied without being widened first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.ops import FORMATS, Format, OpTable, PackedWeight
from penstock.ops.cpu.matmul.packed import pack_into
from penstock.ops.matmul.epilogue import Epilogue
from penstock.quant.gguf import GGML_TYPES
from penstock.quant.scheme import StoredWeight


@dataclass(frozen=True)
class GgmlMatrix:
    """A matrix as a file of quantize_fp8 blocks holds it: one row of bytes per output."""

    ggml_type: int
    raw: np.ndarray  # [O, bytes] uint8
    width: int
    order: np.ndarray | None = None  # int64: the rows to take, in turn; all if absent
    transposed: bool = False  # the checkpoint's own matrix is [C, O]

    @property
    def num_out(self) -> int:
        return len(self.raw) if self.order is None else len(self.order)

    @property
    def format(self) -> Format | None:
        """The packed format of its blocks; None if there is none."""
        return FORMATS.get(GGML_TYPES[self.ggml_type].name)


def pack(stored: Sequence[GgmlMatrix]) -> PackedWeight:
    """Pack matrices of one type on top of each other."""
    format = stored[0].format
    if format is None or any(part.ggml_type != stored[0].ggml_type for part in stored):
        raise ValueError(f"types {[part.ggml_type for part in stored]} cannot be packed together")
    weight = PackedWeight.empty(format, sum(part.num_out for part in stored), stored[0].width)
    first = 0
    for part in stored:
        first += pack_into(weight, first, part.ggml_type, part.raw, part.order)
    return weight


class Packed(StoredWeight):
    """A weight in one or more packed parts.

    Activations are rounded to integers of `x_bits` bits; with 0 the weights are widened to float32.
    """

    def __init__(
        self, ops: OpTable, parts: Sequence[PackedWeight], bias: Tensor | None = None, x_bits: int = 8
    ) -> None:
        super().__init__(ops, (sum(part.num_out for part in parts), parts[0].width), bias)
        self.parts, self.x_bits = tuple(parts), x_bits

    @classmethod
    def from_stored(cls, ops: OpTable, stored: Sequence[GgmlMatrix], bias: Tensor | None, x_bits: int) -> Packed:
        """Pack stored matrices; neighbours of one type become one part."""
        runs: list[list[GgmlMatrix]] = []
        for part in stored:
            if runs and runs[-1][0].ggml_type == part.ggml_type:
                runs[-1].append(part)
            else:
                runs.append([part])
        return cls(ops, [pack(run) for run in runs], bias, x_bits)

    @classmethod
    def from_stacks(
        cls, ops: OpTable, stored: Sequence[GgmlMatrix], num_matrices: int, bias: Tensor | None, x_bits: int
    ) -> Packed | None:
        """Pack the parts of all matrices of a stack, matrix by matrix. Parts of different types, such as gates and ups,
        become stacks of their own; None where that is not enough."""
        count = len(stored) // num_matrices
        alike = len({part.ggml_type for part in stored}) == 1
        groups = [stored] if alike else [stored[first::count] for first in range(count)]
        if any(len({part.ggml_type for part in group}) > 1 for group in groups):
            return None
        return cls(ops, [pack(group) for group in groups], bias, x_bits)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(part.num_bytes for part in self.parts)

    def matmul(self, x: Tensor) -> Tensor:
        return self.ops.packed_linear(x, self.parts, self.x_bits, Epilogue(self.bias))

    def grouped_matmul(self, x: Tensor, ids: Tensor, num_matrices: int) -> Tensor:
        return self.ops.grouped_packed_matmul(x, self.parts, ids, num_matrices, self.x_bits, Epilogue(self.bias))

    def rows(self, ids: Tensor) -> Tensor:
        if len(self.parts) == 1:
            return self.ops.packed_rows(ids, self.parts[0])
        return torch.cat([part.unpack() for part in self.parts])[ids]
