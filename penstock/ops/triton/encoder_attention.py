from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention import Work
from penstock.ops.encoder_attention import encoder_attention
from penstock.ops.triton.attention import LOG2_E, TILE, make_work
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.sizes import power_of_2


@triton.jit
def _encoder(
    q,
    k,
    v,
    query_start,
    tiles,
    out,
    scale,
    q_row,
    k_row,
    v_row,
    q_head,
    k_head,
    v_head,
    num_heads,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    NUM: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ROWS queries of one sequence over all its keys, for one head."""
    await_others(EARLY)
    tile, h = tl.program_id(0), tl.program_id(1)
    s, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    begin = tl.load(query_start + s)
    count = tl.load(query_start + s + 1) - begin
    r, n, d = first + tl.arange(0, ROWS), tl.arange(0, NUM), tl.arange(0, BLOCK)
    within = (d < SIZE)[None, :]
    inside = (r < count)[:, None] & within
    row = (begin + r).to(tl.int64)
    query = tl.load(q + (row * q_row + h * q_head)[:, None] + d[None, :], mask=inside, other=0.0)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, count, NUM):
        there = start + n < count
        token = (begin + start + n).to(tl.int64)
        wanted = there[:, None] & within
        key = tl.load(k + (token * k_row + h * k_head)[:, None] + d[None, :], mask=wanted, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * LOG2_E)
        scores = tl.where(there[None, :], scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        p = tl.exp2(scores - now[:, None])
        kept = tl.exp2(most - now)
        value = tl.load(v + (token * v_row + h * v_head)[:, None] + d[None, :], mask=wanted, other=0.0)
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
        work = make_work(query_start.tolist(), 1, 1, q.device)
    assert work.tiles is not None
    block, wide = max(16, power_of_2(size)), q.dtype == torch.float32
    _encoder[(len(work.tiles), num_heads)](
        q,
        k,
        v,
        query_start,
        work.tiles,
        out,
        scale,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        q.stride(1),
        k.stride(1),
        v.stride(1),
        num_heads,
        size,
        block,
        TILE,
        64 if block <= 128 and not wide else 32,
        "ieee" if wide else "tf32",
        num_warps=8,
        num_stages=1 if wide else 2,
        **early(q),
    )
    return out
