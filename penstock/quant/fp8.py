"""FP8 (e4m3) on a GPU: a scale for each output, or for each group of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.ops import OpTable
from penstock.ops.matmul.epilogue import Epilogue
from penstock.ops.matmul.fp8_product import FP8, can_group, can_store, quantize_fp8
from penstock.quant.coded import Coded
from penstock.quant.dense import Matrix
from penstock.quant.packed import Stored
from penstock.quant.scheme import Scheme, StoredWeight

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

    @classmethod
    def from_codes(cls, ops: OpTable, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Fp8:
        """Keep codes as they are."""
        made = cls.__new__(cls)
        StoredWeight.__init__(made, ops, codes.shape, bias)
        made.codes, made.scale = codes, scale
        return made

    def matmul(self, x: Tensor) -> Tensor:
        return self.ops.fp8_product(x, self.codes, self.scale, Epilogue(self.bias))

    def grouped_matmul(self, x: Tensor, ids: Tensor, num_matrices: int) -> Tensor:
        return self.ops.grouped_fp8_product(x, self.codes, self.scale, ids, num_matrices, Epilogue(self.bias))

    def rows(self, ids: Tensor) -> Tensor:
        return self.codes.view(torch.uint8)[ids].view(FP8).float() * self.scale[ids, None]


class Fp8Groups(StoredWeight):
    """A weight as codes and scales [ceil(C / group), O]."""

    def __init__(self, ops: OpTable, codes: Tensor, scale: Tensor, group: int, bias: Tensor | None = None) -> None:
        super().__init__(ops, codes.shape, bias)
        self.codes, self.scale, self.group = codes, scale, group

    def matmul(self, x: Tensor) -> Tensor:
        return self.ops.fp8_group_product(x, self.codes, self.scale, self.group, Epilogue(self.bias))

    def grouped_matmul(self, x: Tensor, ids: Tensor, num_matrices: int) -> Tensor:
        return self.ops.grouped_fp8_group_product(
            x, self.codes, self.scale, self.group, ids, num_matrices, Epilogue(self.bias)
        )

    def rows(self, ids: Tensor) -> Tensor:
        scale = self.scale[:, ids].t().repeat_interleave(self.group, dim=1)[:, : self.num_in]
        return self.codes.view(torch.uint8)[ids].view(FP8).float() * scale


def as_fp8(scheme: Any) -> Any:
    """Store a matrix as FP8 where its shape allows it."""
    if isinstance(scheme, Matrix) and can_store(scheme.num_out, scheme.num_in):
        return Fp8(scheme.ops, scheme.weight, scheme.bias)
    return scheme


def keep_fp8(ops: OpTable, stored: Sequence[Stored], bias: Tensor | None, device: torch.device) -> Scheme | None:
    """Make one weight of matrices of 8-bit floats, on top of each other, on a device, with the codes that they have;
    None where they must be widened."""
    parts = [part for part in stored if isinstance(part, Coded) and part.is_float8]
    num_out, width = sum(part.num_out for part in stored), stored[0].width
    groups = {part.group for part in parts if part.scale.shape[1] > 1}
    if len(parts) != len(stored) or len(groups) > 1 or not can_store(num_out, width):
        return None
    group = groups.pop() if groups else width
    if group < width and not can_group(num_out, width, group):
        return None
    codes = torch.cat([part.codes for part in parts]).to(device).view(FP8)
    scales = [part.scale.expand(-1, -(-width // group)) for part in parts]
    scale = torch.cat([each.float() for each in scales]).to(device)
    if group >= width:
        return Fp8.from_codes(ops, codes, scale.flatten(), bias)
    return Fp8Groups(ops, codes, scale.t().contiguous(), group, bias)


def blank_fp8(
    ops: OpTable, num_out: int, width: int, group: int, bias: Tensor | None, device: torch.device
) -> Scheme | None:
    """Make such a weight without values; None where it would be widened."""
    if not can_store(num_out, width) or (group < width and not can_group(num_out, width, group)):
        return None
    codes = torch.empty(num_out, width, dtype=FP8, device=device)
    if group >= width:
        return Fp8.from_codes(ops, codes, torch.empty(num_out, device=device), bias)
    return Fp8Groups(ops, codes, torch.empty(-(-width // group), num_out, device=device), group, bias)
