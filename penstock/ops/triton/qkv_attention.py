"""Queries that are made where they are used: norm, rotation, the cache's new keys and values, and attention in one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention import Work, attention
from penstock.ops.qkv_attention import qkv_attention
from penstock.ops.qkv_write import qkv_write
from penstock.ops.triton.attention import _attend, _blocks, _joined, _nothing, _part, _reads, _scores, _taken_in
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.numbers import fitted, norm_factor
from penstock.ops.triton.sizes import norm_block, power_of_2

MOST_VALUES = 8192  # of a program's queries and keys; more take more shared memory than Ada has


@triton.jit
def _turned(
    head,
    g,
    d,
    q_norm,
    k_norm,
    cos,
    sin,
    position,
    eps,
    row_factor,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The heads at head[n] times the row's factor, normed and rotated [n, BLOCK]. A value meets the one that it is
    rotated with by a second look at the same place."""
    is_query = g < GROUP
    x = tl.load(head[:, None] + d[None, :], mask=(d < SIZE)[None, :], other=0.0).to(tl.float32) * row_factor
    factor = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)
    x *= _norms(factor, d, d < SIZE, is_query, q_norm, k_norm)
    if cos is not None:
        rotated = (d < 2 * HALF)[None, :] & (g >= 0)[:, None]
        other = tl.where(d < HALF, d + HALF, d - HALF)
        y = tl.load(head[:, None] + other[None, :], mask=rotated, other=0.0).to(tl.float32) * row_factor
        y *= _norms(factor, other, d < 2 * HALF, is_query, q_norm, k_norm)
        at = (g * 0)[:, None] + (position * HALF + tl.where(d < HALF, d, d - HALF))[None, :]
        c = tl.load(cos + at, mask=rotated, other=1.0)
        s = tl.load(sin + at, mask=rotated, other=0.0)
        x = x * c + y * tl.where((d < HALF)[None, :], -s, s)
    return x


@triton.jit
def _norms(factor, at, inside, is_query, q_norm, k_norm):
    """What the norms multiply the values `at` of each head by; queries and keys have their own, or none."""
    w = factor[:, None] * 0.0 + 1.0
    if q_norm is not None:
        mine = is_query[:, None] & inside[None, :]
        w = tl.where(mine, factor[:, None] * tl.load(q_norm + at[None, :], mask=mine, other=0.0).to(tl.float32), w)
    if k_norm is not None:
        mine = (is_query == 0)[:, None] & inside[None, :]
        w = tl.where(mine, factor[:, None] * tl.load(k_norm + at[None, :], mask=mine, other=0.0).to(tl.float32), w)
    return w


@triton.jit(do_not_specialize=["num_parts", "table_row"])
def _made_and_used(
    qkv,
    k_cache,
    v_cache,
    slots,
    table,
    lengths,
    alibi,
    q_norm,
    k_norm,
    cos,
    sin,
    source,
    out,
    parts,
    tops,
    scale,
    softcap,
    window,
    eps,
    source_eps,
    qkv_row,
    source_row,
    source_width,
    k_block,
    k_head,
    k_place,
    v_block,
    v_head,
    v_place,
    table_row,
    num_parts,
    num_heads,
    num_kv_heads,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM: tl.constexpr,
    PRECISION: tl.constexpr,
    NORMED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The query heads of one key head of a sequence, and the key after them. The first part begins with that key, which
    it stores; all parts read older ones."""
    await_others(EARLY)
    h, s, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + s)
    position = tl.maximum(length - 1, 0)
    low, start, end = _part(length * 0, length, position, window, part, num_parts, NUM)
    ahead = _blocks(table + s * table_row, start + tl.arange(0, NUM), low, end, P, False)
    row = qkv + s * qkv_row
    row_factor = 1.0
    if source is not None:
        row_factor = norm_factor(source + s * source_row, source_width, source_eps, NORMED)
    g, d = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    head = tl.where(g < GROUP, h * GROUP + g, num_heads + h)  # beyond the queries the key, time and again
    x = _turned(row + head * SIZE, g, d, q_norm, k_norm, cos, sin, position, eps, row_factor, GROUP, HALF, SIZE)
    v = tl.load(
        row + ((num_heads + num_kv_heads + h) * SIZE + g * 0)[:, None] + d[None, :],
        mask=(g == GROUP)[:, None] & (d < SIZE)[None, :],
        other=0.0,
    )
    k = fitted(x, k_cache.dtype.element_ty)
    v = fitted(v.to(tl.float32) * row_factor, v_cache.dtype.element_ty)
    slot = tl.load(slots + s)
    own = g == tl.where(part == 0, GROUP, -1)
    stored = own[:, None] & (d < tl.where(slot >= 0, SIZE, 0))[None, :]
    block, place = slot // P, slot % P
    tl.store(k_cache + block * k_block + h * k_head + place * k_place + (g * 0)[:, None] + d[None, :], k, mask=stored)
    tl.store(v_cache + block * v_block + h * v_head + place * v_place + (g * 0)[:, None] + d[None, :], v, mask=stored)
    query = fitted(x, qkv.dtype.element_ty)
    slope = None
    if alibi is not None:
        slope = tl.load(alibi + head, mask=g < GROUP, other=0.0)
    at = tl.zeros((ROWS,), tl.int32) + position
    most, total, sums = _nothing(ROWS, BLOCK)
    scores, factor = _scores(
        query,
        k.to(query.dtype),
        tl.where(own, position, position + 1),
        at,
        slope,
        scale,
        softcap,
        window,
        True,
        PRECISION,
    )
    most, total, sums = _taken_in(scores, factor, v.to(query.dtype), most, total, sums, PRECISION)
    most, total, sums = _attend(
        query,
        most,
        total,
        sums,
        start,
        low,
        end,
        table + s * table_row,
        k_cache + h * k_head,
        v_cache + h * v_head,
        at,
        slope,
        scale,
        softcap,
        window,
        k_block,
        k_place,
        v_block,
        v_place,
        P,
        SIZE,
        BLOCK,
        NUM,
        window > 0,
        PRECISION,
        False,
        False,
        ahead,
    )
    inside = (g < GROUP)[:, None] & (d < SIZE)[None, :]
    if parts is None:
        y = sums / total[:, None]
        tl.store(out + (s * num_heads + head)[:, None] * SIZE + d[None, :], y.to(out.dtype.element_ty), mask=inside)
    else:
        at_part = (s * num_parts + part) * num_heads + head
        tl.store(tops + 2 * at_part, most, mask=g < GROUP)
        tl.store(tops + 2 * at_part + 1, total, mask=g < GROUP)
        tl.store(parts + at_part[:, None] * SIZE + d[None, :], sums, mask=inside)


@qkv_attention.impl("cuda", exact=False)
def _body(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    source: Tensor | None = None,
    source_eps: float = 0.0,
    num_parts: int = 1,
) -> Tensor:
    num_sequences, (_, num_kv_heads, size, block_size) = qkv.shape[0], k_cache.shape
    num_heads = qkv.shape[1] // size - 2 * num_kv_heads
    group, block = num_heads // num_kv_heads, max(16, power_of_2(size))
    rows = max(16, power_of_2(group + 1))
    # With a cache of 8-bit floats this kernel gave NaN on an H200 where it takes all registers that a thread may have
    # (float32, or norms of heads and of rows in bfloat16), for a reason not found: such a cache takes two kernels.
    if k_cache.stride(2) != 1 or v_cache.stride(3) != 1 or rows * block > MOST_VALUES or k_cache.itemsize == 1:
        q = qkv_write(
            qkv, k_cache, v_cache, slots, positions, q_norm, k_norm, eps, cos, sin, None, None, source, source_eps
        )
        starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=q.device)
        return attention(
            q,
            k_cache,
            v_cache,
            table,
            starts,
            lengths,
            scale,
            window,
            softcap,
            alibi,
            work=Work(num_sequences, None, num_parts),
        )
    out = torch.empty((num_sequences, num_heads, size), dtype=qkv.dtype, device=qkv.device)
    parts = tops = None
    if num_parts > 1:
        parts = torch.empty((num_sequences, num_parts, num_heads, size), device=qkv.device)
        tops = torch.empty((num_sequences, num_parts, num_heads, 2), device=qkv.device)
    at_once, num_stages = _reads(num_sequences, block, qkv.dtype)
    _made_and_used[(num_kv_heads, num_sequences, num_parts)](
        qkv,
        k_cache,
        v_cache,
        slots,
        table,
        lengths,
        alibi,
        q_norm,
        k_norm,
        cos,
        sin,
        source,
        out,
        parts,
        tops,
        scale,
        softcap or None,
        window,
        eps,
        source_eps,
        qkv.stride(0),
        0 if source is None else source.stride(0),
        0 if source is None else source.shape[1],
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(3),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        table.stride(0),
        num_parts,
        num_heads,
        num_kv_heads,
        block_size,
        group,
        rows,
        0 if cos is None else cos.shape[1],
        size,
        block,
        at_once,
        "ieee" if qkv.dtype == torch.float32 else "tf32",
        norm_block(0 if source is None else source.shape[1]),
        num_warps=4,
        num_stages=num_stages,
        **early(qkv),
    )
    if parts is not None:
        _joined[(num_sequences, num_heads)](
            parts, tops, out, num_parts, num_heads, size, block, power_of_2(num_parts), num_warps=4, **early(qkv)
        )
    return out
