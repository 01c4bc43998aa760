from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention.attention import Work
from penstock.ops.attention.encoder_attention import encoder_attention
from penstock.ops.triton.attention.attend import LOG2_E, make_work
from penstock.ops.triton.launch import dot_precision, pdl_options, wait_for_previous
from penstock.ops.triton.sizes import power_of_2
from penstock.ops.triton.tuning import ATTENTION_TILE_ROWS


@triton.jit
def _encoder_attention(
    q,
    k,
    v,
    query_start,
    tiles,
    out,
    scale,
    q_strides,
    k_strides,
    v_strides,
    num_heads,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    NUM: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS queries of one sequence over all of its keys, for one head."""
    wait_for_previous(PDL)
    tile, h = tl.program_id(0), tl.program_id(1)
    s, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    begin = tl.load(query_start + s)
    count = tl.load(query_start + s + 1) - begin
    r, n, d = first + tl.arange(0, ROWS), tl.arange(0, NUM), tl.arange(0, BLOCK)
    within = (d < SIZE)[None, :]
    inside = (r < count)[:, None] & within
    row = (begin + r).to(tl.int64)
    query = tl.load(q + (row * q_strides[0] + h * q_strides[1])[:, None] + d[None, :], mask=inside, other=0.0)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, count, NUM):
        there = start + n < count
        token = (begin + start + n).to(tl.int64)
        wanted = there[:, None] & within
        key = tl.load(k + (token * k_strides[0] + h * k_strides[1])[:, None] + d[None, :], mask=wanted, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * LOG2_E)
        scores = tl.where(there[None, :], scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        p = tl.exp2(scores - now[:, None])
        kept = tl.exp2(most - now)
        value = tl.load(v + (token * v_strides[0] + h * v_strides[1])[:, None] + d[None, :], mask=wanted, other=0.0)
        sums = sums * kept[:, None] + tl.dot(p.to(value.dtype), value, input_precision=PRECISION)
        total = total * kept + tl.sum(p, 1)
        most = now
    y = sums / total[:, None]
    tl.store(out + (row * num_heads + h)[:, None] * SIZE + d[None, :], y.to(out.dtype.element_ty), mask=inside)


@encoder_attention.impl("cuda", exact=True)
def _body(q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, scale: float, work: Work | None = None) -> Tensor:
    num_tokens, num_heads, size = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    q, k, v = (one if one.stride(2) == 1 else one.contiguous() for one in (q, k, v))
    if work is None or work.tiles is None:
        work = make_work(query_start, ATTENTION_TILE_ROWS)
    assert work.tiles is not None
    block, wide = max(16, power_of_2(size)), q.dtype == torch.float32
    _encoder_attention[(len(work.tiles), num_heads)](
        q,
        k,
        v,
        query_start,
        work.tiles,
        out,
        scale,
        q.stride()[:2],
        k.stride()[:2],
        v.stride()[:2],
        num_heads,
        size,
        block,
        ATTENTION_TILE_ROWS,
        64 if block <= 128 and not wide else 32,
        dot_precision(q.dtype),
        num_warps=8,
        num_stages=1 if wide else 2,
        **pdl_options(q),
    )
    return out
