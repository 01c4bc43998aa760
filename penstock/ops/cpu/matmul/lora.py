from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.cpu.runtime.library import Kernel, as_integers, as_rows
from penstock.ops.matmul.lora import LoraWeights, add_grouped_lora, add_lora, add_lora_rows

_product = Kernel("add_lora", "pnnnpppnnnpnnpn")
_rows = Kernel("add_lora_rows", "pnpppnnnnpn")
_grouped = Kernel("add_grouped_lora", "pnnnnppnnppnnnnpn")


def _check(y: Tensor, slots: Tensor, weights: LoraWeights) -> Tensor:
    if y.shape != (len(slots), weights.num_out) or y.stride(1) != 1 or y.dtype is not torch.float32:
        raise ValueError(f"y {tuple(y.shape)} is no float32 [{len(slots)}, {weights.num_out}] with whole rows")
    return as_integers(slots, torch.int32)


def _table(weights: LoraWeights) -> tuple[int, ...]:
    return weights.records.data_ptr(), weights.shifts.data_ptr(), *weights.records.shape[:3]


@add_lora.impl("cpu", exact=True)
def _add_lora(x: Tensor, y: Tensor, slots: Tensor, weights: LoraWeights, residual: Tensor | None = None) -> Tensor:
    x, slots = as_rows("x", x), _check(y, slots, weights)
    left = None if residual is None else as_rows("residual", residual)
    if left is not None and left.shape != y.shape:
        raise ValueError(f"a residual {tuple(left.shape)} does not fit y {tuple(y.shape)}")
    stride = 0 if left is None else left.stride(0)
    _product(
        x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], slots.data_ptr(), *_table(weights),
        None if left is None else left.data_ptr(), stride, weights.num_out, y.data_ptr(), y.stride(0),
    )  # fmt: skip
    return y


@add_lora_rows.impl("cpu", exact=True)
def _add_lora_rows(ids: Tensor, y: Tensor, slots: Tensor, weights: LoraWeights) -> Tensor:
    ids, slots = as_integers(ids, torch.int64), _check(y, slots, weights)
    _rows(
        ids.data_ptr(), len(ids), slots.data_ptr(), *_table(weights), weights.num_out, y.data_ptr(), y.stride(0),
    )  # fmt: skip
    return y


@add_grouped_lora.impl("cpu", exact=True)
def _add_grouped_lora(x: Tensor, y: Tensor, slots: Tensor, weights: LoraWeights, ids: Tensor | None = None) -> Tensor:
    num_tokens, count, num_out = y.shape
    if num_out != weights.num_out or not y.is_contiguous() or y.dtype is not torch.float32:
        raise ValueError(f"y {tuple(y.shape)} is no contiguous float32 [T, K, {weights.num_out}]")
    slots = as_integers(slots, torch.int32)
    matrices = None if ids is None else as_integers(ids, torch.int32)
    if len(slots) != num_tokens or (matrices is None and count != weights.num_matrices):
        raise ValueError(f"y {tuple(y.shape)} does not fit {len(slots)} slots and {weights.num_matrices} matrices")
    rows = as_rows("x", x if x.dim() == 2 else x.flatten(0, 1))
    shared = count if x.dim() == 2 else 1
    if rows.shape[0] * shared != num_tokens * count:
        raise ValueError(f"x {tuple(x.shape)} does not fit y {tuple(y.shape)}")
    _grouped(
        rows.data_ptr(), rows.stride(0), max(shared, 1), num_tokens * count, rows.shape[1], slots.data_ptr(),
        None if matrices is None else matrices.data_ptr(), max(count, 1), weights.num_matrices, *_table(weights),
        num_out, y.data_ptr(), num_out,
    )  # fmt: skip
    return y
