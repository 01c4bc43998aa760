"""Fused decode attention: head norms, rope, cache write and attention in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention.attention import Work, attention
from penstock.ops.attention.qkv_attention import qkv_attention
from penstock.ops.attention.qkv_write import qkv_write
from penstock.ops.triton.attention.attend import (
    Scoring,
    Splits,
    attend,
    cache_args,
    can_read,
    find_split,
    init_softmax,
    load_blocks,
    load_slopes,
    make_splits,
    score_keys,
    store_split,
    update_softmax,
)
from penstock.ops.triton.attention.attention import merge_splits
from penstock.ops.triton.attention.qkv_write import Rotation, source_args
from penstock.ops.triton.launch import dot_precision, pdl_options, wait_for_previous
from penstock.ops.triton.numbers import norm_factor, saturate
from penstock.ops.triton.sizes import norm_block, power_of_2
from penstock.ops.triton.tuning import MAX_FUSED_QKV_VALUES, decode_read_shape


@triton.jit
def _norm_and_rotate(
    head, g, d, rotation, position, row_factor, GROUP: tl.constexpr, HALF: tl.constexpr, SIZE: tl.constexpr
):
    """Return the heads at head[n] times the row's factor, normed and rotated [n, BLOCK]. A second load brings each
    value its partner."""
    is_query = g < GROUP
    x = tl.load(head[:, None] + d[None, :], mask=(d < SIZE)[None, :], other=0.0).to(tl.float32) * row_factor
    factor = tl.rsqrt(tl.sum(x * x, 1) / SIZE + rotation.eps)
    x *= _norm_weights(factor, d, d < SIZE, is_query, rotation)
    if rotation.cos is not None:
        rotated = (d < 2 * HALF)[None, :] & (g >= 0)[:, None]
        other = tl.where(d < HALF, d + HALF, d - HALF)
        y = tl.load(head[:, None] + other[None, :], mask=rotated, other=0.0).to(tl.float32) * row_factor
        y *= _norm_weights(factor, other, d < 2 * HALF, is_query, rotation)
        at = (g * 0)[:, None] + (position * HALF + tl.where(d < HALF, d, d - HALF))[None, :]
        c = tl.load(rotation.cos + at, mask=rotated, other=1.0)
        s = tl.load(rotation.sin + at, mask=rotated, other=0.0)
        x = x * c + y * tl.where((d < HALF)[None, :], -s, s)
    return x


@triton.jit
def _norm_weights(factor, at, inside, is_query, rotation):
    """Return what the norms multiply the values `at` of each head by; queries and keys have their own, or none."""
    w = factor[:, None] * 0.0 + 1.0
    if rotation.q_norm is not None:
        mine = is_query[:, None] & inside[None, :]
        w = tl.where(
            mine, factor[:, None] * tl.load(rotation.q_norm + at[None, :], mask=mine, other=0.0).to(tl.float32), w
        )
    if rotation.k_norm is not None:
        mine = (is_query == 0)[:, None] & inside[None, :]
        w = tl.where(
            mine, factor[:, None] * tl.load(rotation.k_norm + at[None, :], mask=mine, other=0.0).to(tl.float32), w
        )
    return w


@triton.jit(do_not_specialize=["num_kv_splits", "table_row"])
def _fused_decode(
    qkv,
    cache,
    slots,
    table,
    lengths,
    rotation,
    source,
    out,
    splits,
    scoring,
    qkv_row,
    table_row,
    num_kv_splits,
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
    NORM_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The query heads of one KV head of a sequence, and its new key. The first split stores that key and begins with
    it; all splits read older ones."""
    wait_for_previous(PDL)
    h, s, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + s)
    position = tl.maximum(length - 1, 0)
    low, start, end = find_split(length * 0, length, position, scoring.window, split, num_kv_splits, NUM)
    next_blocks = load_blocks(table + s * table_row, start + tl.arange(0, NUM), low, end, P, False)
    row = qkv + s * qkv_row
    row_factor = 1.0
    if source.x is not None:
        row_factor = norm_factor(source.x + s * source.row, source.width, source.eps, NORM_BLOCK)
    g, d = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    head = tl.where(g < GROUP, h * GROUP + g, num_heads + h)  # rows beyond the queries repeat the key
    x = _norm_and_rotate(row + head * SIZE, g, d, rotation, position, row_factor, GROUP, HALF, SIZE)
    v = tl.load(
        row + ((num_heads + num_kv_heads + h) * SIZE + g * 0)[:, None] + d[None, :],
        mask=(g == GROUP)[:, None] & (d < SIZE)[None, :],
        other=0.0,
    )
    k = saturate(x, cache.k.dtype.element_ty)
    v = saturate(v.to(tl.float32) * row_factor, cache.v.dtype.element_ty)
    slot = tl.load(slots + s)
    own = g == tl.where(split == 0, GROUP, -1)
    stored = own[:, None] & (d < tl.where(slot >= 0, SIZE, 0))[None, :]
    block, place = slot // P, slot % P
    k_at = cache.k + block * cache.k_block + h * cache.k_head + place * cache.k_position
    v_at = cache.v + block * cache.v_block + h * cache.v_head + place * cache.v_position
    tl.store(k_at + (g * 0)[:, None] + d[None, :], k, mask=stored)
    tl.store(v_at + (g * 0)[:, None] + d[None, :], v, mask=stored)
    query = saturate(x, qkv.dtype.element_ty)
    slope = load_slopes(scoring.alibi, head, g < GROUP)
    at = tl.zeros((ROWS,), tl.int32) + position
    top, total, sums = init_softmax(scoring.sinks, head, g < tl.where(split == 0, GROUP, 0), ROWS, BLOCK)
    own_at = tl.where(own, position, position + 1)
    scores, factor = score_keys(query, k.to(query.dtype), own_at, at, slope, scoring, True, PRECISION)
    top, total, sums = update_softmax(scores, factor, v.to(query.dtype), top, total, sums, PRECISION)
    top, total, sums = attend(
        query,
        top,
        total,
        sums,
        start,
        low,
        end,
        table + s * table_row,
        cache,
        h,
        at,
        slope,
        scoring,
        P,
        SIZE,
        BLOCK,
        NUM,
        scoring.window > 0,
        PRECISION,
        False,
        False,
        next_blocks,
    )
    inside = (g < GROUP)[:, None] & (d < SIZE)[None, :]
    if splits.sums is None:
        y = sums / total[:, None]
        tl.store(out + (s * num_heads + head)[:, None] * SIZE + d[None, :], y.to(out.dtype.element_ty), mask=inside)
    else:
        at_split = (s * num_kv_splits + split) * num_heads + head
        store_split(splits, at_split, g < GROUP, inside, top, total, sums, SIZE, BLOCK)


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
    num_kv_splits: int = 1,
    sinks: Tensor | None = None,
) -> Tensor:
    num_sequences, (_, num_kv_heads, size, block_size) = qkv.shape[0], k_cache.shape
    num_heads = qkv.shape[1] // size - 2 * num_kv_heads
    group, block = num_heads // num_kv_heads, max(16, power_of_2(size))
    rows = max(16, power_of_2(group + 1))
    # With an FP8 cache this kernel gave NaN on an H200 where it uses all registers of a thread (float32, or norms of
    # heads and of rows in bfloat16), for an unknown reason: such a cache takes two kernels.
    is_fused = can_read(k_cache, v_cache, None) and rows * block <= MAX_FUSED_QKV_VALUES and k_cache.itemsize > 1
    if not is_fused:
        q = qkv_write(
            qkv, k_cache, v_cache, slots, positions, q_norm, k_norm, eps, cos, sin, None, None, source, source_eps
        )
        starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=q.device)
        work = Work(num_sequences, None, num_kv_splits)
        beside = scale, window, softcap, alibi, None, None, work, sinks
        return attention(q, k_cache, v_cache, table, starts, lengths, *beside)
    out = torch.empty((num_sequences, num_heads, size), dtype=qkv.dtype, device=qkv.device)
    splits = Splits(None, None)
    if num_kv_splits > 1:
        splits = make_splits(num_sequences, num_kv_splits, num_heads, size, qkv.device)
    read = decode_read_shape(num_sequences, block, qkv.dtype, k_cache.dtype)
    _fused_decode[(num_kv_heads, num_sequences, num_kv_splits)](
        qkv,
        cache_args(k_cache, v_cache),
        slots,
        table,
        lengths,
        Rotation(q_norm, k_norm, cos, sin, eps),
        source_args(source, source_eps),
        out,
        splits,
        Scoring(scale, softcap or None, window, alibi, sinks),
        qkv.stride(0),
        table.stride(0),
        num_kv_splits,
        num_heads,
        num_kv_heads,
        block_size,
        group,
        rows,
        0 if cos is None else cos.shape[1],
        size,
        block,
        read.num_keys,
        dot_precision(qkv.dtype),
        norm_block(0 if source is None else source.shape[1]),
        num_warps=4,
        num_stages=read.num_stages,
        **pdl_options(qkv),
    )
    if num_kv_splits > 1:
        merge_splits[(num_sequences, num_heads)](
            splits,
            out,
            num_kv_splits,
            num_heads,
            size,
            block,
            power_of_2(num_kv_splits),
            num_warps=4,
            **pdl_options(qkv),
        )
    return out
