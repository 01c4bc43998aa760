from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.pooling import MIN_NORM, pooling
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.sizes import power_of_2
from penstock.ops.triton.tuning import MAX_POOLING_VALUES

_MIN_NORM = tl.constexpr(MIN_NORM)


@triton.jit
def _pooling(
    hidden,
    query_start,
    out,
    row,
    width,
    FIRST: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    s = tl.program_id(0).to(tl.int64)
    begin = tl.load(query_start + s)
    end = tl.load(query_start + s + 1)
    count = 1 if FIRST else end - begin
    at = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, ROWS):
        some = start + tl.arange(0, ROWS)
        inside = (some < count)[:, None] & (at < width)[None, :]
        place = (begin + some).to(tl.int64)[:, None] * row + at[None, :]
        sums += tl.sum(tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32), 0)
    y = sums / count
    if NORMALIZE:
        y = y / tl.maximum(tl.sqrt_rn(tl.sum(y * y)), _MIN_NORM)
    tl.store(out + s * width + at, y, mask=at < width)


@pooling.impl("cuda", exact=True)
def _body(hidden: Tensor, query_start: Tensor, first: bool, normalize: bool) -> Tensor:
    num_sequences, width = query_start.shape[0] - 1, hidden.shape[1]
    out = torch.empty((num_sequences, width), dtype=torch.float32, device=hidden.device)
    if out.numel():
        hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
        block = power_of_2(width)
        _pooling[(num_sequences,)](
            hidden,
            query_start,
            out,
            hidden.stride(0),
            width,
            first,
            normalize,
            max(1, min(16, MAX_POOLING_VALUES // block)),
            block,
            num_warps=8,
            **pdl_options(hidden),
        )
    return out
