"""CPU bodies of the ops on packed weights, and packing itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.ops.cpu.matmul.epilogue import check_epilogue
from penstock.ops.cpu.runtime.library import Kernel, as_integers, as_rows, check_float32
from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.matmul.packed import PackedWeight
from penstock.ops.matmul.packed_linear import packed_linear
from penstock.ops.matmul.packed_rows import packed_rows
from penstock.ops.norm import rms_norm

_linear = Kernel("packed_linear", "pnnnippppipfnppniipn")
_rows = Kernel("packed_rows", "pnippppnnp")
_pack = Kernel("pack", "ipnpnnnpppp")


def planes(weight: PackedWeight) -> tuple[int, int, int, int]:
    return weight.codes.data_ptr(), weight.high.data_ptr(), weight.scales.data_ptr(), weight.supers.data_ptr()


@packed_linear.impl("cpu", exact=True)
def _packed_linear(
    x: Tensor,
    parts: Sequence[PackedWeight],
    x_bits: int,
    epilogue: Epilogue = NO_EPILOGUE,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    x = as_rows("x", x)
    if norm is not None:
        if not x_bits:
            x, norm = rms_norm(x, norm, eps), None
        elif norm.shape != x.shape[1:]:
            raise ValueError(f"the norm has {norm.numel()} weights for rows of {x.shape[1]} values")
        else:
            norm = check_float32("norm", norm).contiguous()
    if any(part.width != x.shape[1] for part in parts):
        raise ValueError(f"the packed weight takes rows of {parts[0].width} values, not of {x.shape[1]}")
    if epilogue.gated and len(parts) > 1:
        raise ValueError("a gated product needs its weight in one part")
    checked = check_epilogue(x, sum(part.num_out for part in parts), epilogue)
    first = 0
    for part in parts:
        _linear(
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            x.shape[1],
            part.format.number,
            *planes(part),
            x_bits,
            None if norm is None else norm.data_ptr(),
            eps,
            *checked.arguments(first, part.num_out),
        )
        first += part.num_out
    return checked.out


@packed_rows.impl("cpu", exact=True)
def _packed_rows(ids: Tensor, weight: PackedWeight) -> Tensor:
    ids = as_integers(ids, torch.int64)
    out = torch.empty(ids.shape[0], weight.width)
    _rows(
        ids.data_ptr(),
        ids.shape[0],
        weight.format.number,
        *planes(weight),
        weight.num_out,
        weight.width,
        out.data_ptr(),
    )
    return out


def pack_into(weight: PackedWeight, first: int, ggml_type: int, raw: np.ndarray, order: np.ndarray | None) -> int:
    """Pack GGUF rows raw[R, bytes], all or those of `order`, as outputs from `first` on; give the number."""
    raw = np.ascontiguousarray(raw)
    count = len(raw) if order is None else len(order)
    inside = order is None or count == 0 or (order.min() >= 0 and order.max() < len(raw))
    if first + count > weight.num_out or not inside:
        raise ValueError(f"{count} rows from {first} on do not fit into {weight.num_out} outputs")
    _pack(
        ggml_type,
        raw.ctypes.data,
        raw.shape[1],
        None if order is None else order.ctypes.data,
        count,
        first,
        weight.codes.shape[1],
        *planes(weight),
    )
    return count
