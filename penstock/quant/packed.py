"""Integer codes with scales, multiplied without being widened first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from penstock.ops import FORMATS, Format, OpTable, PackedWeight
from penstock.ops.cpu.matmul.packed import pack_into
from penstock.ops.matmul.epilogue import Epilogue
from penstock.quant.coded import Coded, pack_matrices
from penstock.quant.gguf import GGML_TYPES
from penstock.quant.grid_planes import find_grid_format, pack_grid_rows
from penstock.quant.scheme import StoredWeight

MIN_EXPONENT, MAX_EXPONENT = 104, 143  # of MXFP4's bytes: half of their powers of two are float16


@dataclass(frozen=True)
class GgmlMatrix:
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
    def format(self) -> Format | None:
        """The packed format of its blocks; None if there is none that holds them exactly."""
        name = GGML_TYPES[self.ggml_type].name
        if name == "MXFP4":
            exponents = self.raw.reshape(-1, GGML_TYPES[self.ggml_type].block_bytes)[:, 0]
            if exponents.size and (exponents.min() < MIN_EXPONENT or exponents.max() > MAX_EXPONENT):
                return None
        return find_grid_format(name) or FORMATS.get(name)

    @property
    def is_float8(self) -> bool:
        return False

    @property
    def kind(self) -> int:
        """Matrices of one kind can be packed together."""
        return self.ggml_type

    def take_rows(self, rows: Tensor) -> GgmlMatrix:
        """Return these outputs alone, in this order."""
        return replace(self, order=rows.numpy() if self.order is None else self.order[rows.numpy()])

    def slice_rows(self, rows: range) -> GgmlMatrix:
        """Return these outputs alone; of a stack that is in the file's order, their bytes alone."""
        part = slice(rows.start, rows.stop)
        return replace(self, raw=self.raw[part]) if self.order is None else replace(self, order=self.order[part])

    def take_columns(self, columns: range) -> GgmlMatrix | None:
        """Return these inputs alone; None unless they are whole blocks."""
        kind = GGML_TYPES[self.ggml_type]
        if columns.start % kind.block_size or columns.stop % kind.block_size:
            return None
        begin, end = (each // kind.block_size * kind.block_bytes for each in (columns.start, columns.stop))
        rows = slice(None) if self.order is None else self.order
        return replace(self, raw=np.ascontiguousarray(self.raw[rows, begin:end]), width=len(columns), order=None)


Stored = GgmlMatrix | Coded  # a matrix as its checkpoint codes it


def pack(stored: Sequence[Stored]) -> PackedWeight:
    """Pack matrices of one kind on top of each other."""
    blocks = [part for part in stored if isinstance(part, GgmlMatrix)]
    if not blocks:
        return pack_matrices([part for part in stored if isinstance(part, Coded)])
    format = blocks[0].format
    if format is None or len(blocks) != len(stored) or any(part.kind != blocks[0].kind for part in blocks):
        raise ValueError(f"kinds {[part.kind for part in stored]} cannot be packed together")
    name = GGML_TYPES[blocks[0].ggml_type].name
    if find_grid_format(name) is not None:
        rows = [part.raw if part.order is None else part.raw[part.order] for part in blocks]
        return pack_grid_rows(name, rows[0] if len(rows) == 1 else np.concatenate(rows), blocks[0].width)
    weight = PackedWeight.empty(format, sum(part.num_out for part in blocks), blocks[0].width)
    first = 0
    for part in blocks:
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
    def from_stored(cls, ops: OpTable, stored: Sequence[Stored], bias: Tensor | None, x_bits: int) -> Packed:
        """Pack stored matrices; neighbours of one kind become one part."""
        runs = [list(run) for _, run in groupby(stored, key=lambda part: part.kind)]
        return cls(ops, [pack(run) for run in runs], bias, x_bits)

    @classmethod
    def from_stacks(
        cls, ops: OpTable, stored: Sequence[Stored], num_matrices: int, bias: Tensor | None, x_bits: int
    ) -> Packed | None:
        """Pack the parts of all matrices of a stack, matrix by matrix, or the stack. Parts of different kinds, such as
        gates and ups, become stacks of their own; None where that is not enough."""
        if any(isinstance(part, Coded) and part.order is not None for part in stored):
            return None
        count = len(stored) // num_matrices
        alike = len({part.kind for part in stored}) == 1
        groups = [stored] if alike else [stored[first::count] for first in range(count)]
        if any(len({part.kind for part in group}) > 1 for group in groups):
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
