"""Products with packed weights, their rows, and packing itself."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.cpu.finish import finish
from penstock.ops.cpu.library import Kernel, integers, rows
from penstock.ops.packed import GROUP, PackedWeight
from penstock.ops.packed_linear import packed_linear
from penstock.ops.packed_rows import packed_rows

_linear = Kernel("packed_linear", "pnnnippppinppniipn")
_rows = Kernel("packed_rows", "pnippppnnp")
_pack = Kernel("pack", "ipnpnnnpppp")


def _planes(weight: PackedWeight) -> tuple[int, int, int, int]:
    return weight.codes.data_ptr(), weight.high.data_ptr(), weight.scales.data_ptr(), weight.supers.data_ptr()


@packed_linear.impl("cpu", exact=True)
def _packed_linear(x: Tensor, weight: PackedWeight, rounded: bool, bias: Tensor | None = None,
                   residual: Tensor | None = None, activation: str | None = None, gated: bool = False) -> Tensor:
    x = rows("x", x)
    if x.shape[1] != weight.width:
        raise ValueError(f"the packed weight takes rows of {weight.width} values, not of {x.shape[1]}")
    end = finish(x, weight.num_out, bias, residual, activation, gated)
    _linear(x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], weight.format.number, *_planes(weight), rounded,
            *end.arguments)
    return end.out


@packed_rows.impl("cpu", exact=True)
def _packed_rows(ids: Tensor, weight: PackedWeight) -> Tensor:
    ids = integers(ids, torch.int64)
    out = torch.empty(ids.shape[0], weight.width)
    _rows(ids.data_ptr(), ids.shape[0], weight.format.number, *_planes(weight), weight.num_out, weight.width,
          out.data_ptr())
    return out


def pack_into(weight: PackedWeight, first: int, ggml_type: int, raw: Tensor, order: Tensor | None) -> int:
    """Rows of GGUF blocks raw[R, bytes], all or those of `order`, become the outputs from `first` on; how many."""
    count = raw.shape[0] if order is None else order.shape[0]
    if first + count > weight.num_out or weight.width % GROUP or (order is not None and int(order.max()) >= len(raw)):
        raise ValueError(f"{count} rows from {first} on do not fit into {weight.num_out} outputs")
    raw = raw.contiguous()
    _pack(ggml_type, raw.data_ptr(), raw.shape[1], None if order is None else order.data_ptr(), count, first,
          weight.width // GROUP, *_planes(weight))
    return count
