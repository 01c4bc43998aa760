from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.cpu.runtime.library import Kernel, as_integers, as_rows
from penstock.ops.matmul.lora import LoraWeights, add_lora, add_lora_rows

_product = Kernel("add_lora", "pnnnppnnnpn")
_rows = Kernel("add_lora_rows", "pnppnnnpn")


def _check(y: Tensor, slots: Tensor, weights: LoraWeights) -> Tensor:
    if y.shape != (len(slots), weights.num_out) or y.stride(1) != 1 or y.dtype is not torch.float32:
        raise ValueError(f"y {tuple(y.shape)} is no float32 [{len(slots)}, {weights.num_out}] with whole rows")
    return as_integers(slots, torch.int32)


@add_lora.impl("cpu", exact=True)
def _add_lora(x: Tensor, y: Tensor, slots: Tensor, weights: LoraWeights) -> Tensor:
    x, slots, records = as_rows("x", x), _check(y, slots, weights), weights.records
    _product(
        x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], slots.data_ptr(), records.data_ptr(), *records.shape[:3],
        y.data_ptr(), y.stride(0),
    )  # fmt: skip
    return y


@add_lora_rows.impl("cpu", exact=True)
def _add_lora_rows(ids: Tensor, y: Tensor, slots: Tensor, weights: LoraWeights) -> Tensor:
    ids, slots, records = as_integers(ids, torch.int64), _check(y, slots, weights), weights.records
    _rows(
        ids.data_ptr(), len(ids), slots.data_ptr(), records.data_ptr(), *records.shape[:3], y.data_ptr(), y.stride(0),
    )  # fmt: skip
    return y
