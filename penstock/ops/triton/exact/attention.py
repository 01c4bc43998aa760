"""Deterministic attention: splits of a fixed number of positions, merged in order.

Splits and the tiles of keys in them begin at multiples of their size in every step. Keys are the first dimension of a
product and queries the second, so that a few queries and many get the same bits; keys that a query does not see change
none of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention.attention import Work, attention
from penstock.ops.triton.attention.attend import (
    LOG2_E,
    Scoring,
    Splits,
    cache_args,
    can_read,
    cast_query,
    compact_heads,
    init_softmax,
    load_blocks,
    load_slopes,
    load_tile,
    make_splits,
    make_work,
)
from penstock.ops.triton.launch import dot_precision, is_hopper, pdl_options, wait_for_previous
from penstock.ops.triton.numbers import tanh
from penstock.ops.triton.sizes import cdiv, power_of_2
from penstock.ops.triton.tuning import (
    EXACT_SPLIT_POSITIONS,
    MAX_EXACT_SPLIT_BYTES,
    MAX_FULL_TILE_HEAD_SIZE,
    MIN_EXACT_ATTENTION_PROGRAMS,
    MIN_EXACT_ATTENTION_ROWS,
    MIN_EXACT_SINGLE_ROWS,
)


@triton.jit
def _attend(
    q,
    top,
    total,
    sums,
    start,
    low,
    end,
    table,
    cache,
    h,
    position,
    slope,
    scoring,
    P: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Continue an online softmax of queries q[M, D], with sums[D, M], over the keys start … end - 1 of head h, NUM at a
    time, leaving out those under `low`."""
    d = tl.arange(0, BLOCK)
    k_cache, v_cache = cache.k + h * cache.k_head, cache.v + h * cache.v_head
    factor = LOG2_E * scoring.scale
    if scoring.softcap is not None or slope is not None:
        factor = LOG2_E * 1.0
    for begin in range(start, end, NUM):
        j = begin + tl.arange(0, NUM)
        block = load_blocks(table, j, low, end, P, False).to(tl.int64)
        keys = k_cache + (block * cache.k_block + (j % P) * cache.k_position)[:, None] + d[None, :]
        values = v_cache + (block * cache.v_block + (j % P) * cache.v_position)[:, None] + d[None, :]
        k = load_tile(keys, d, block, SIZE, BLOCK, False, False).to(q.dtype)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if scoring.softcap is not None:
            s = scoring.softcap * tanh(s * scoring.scale / scoring.softcap)
        if slope is not None:
            if scoring.softcap is None:
                s *= scoring.scale
            s += slope[None, :] * (j[:, None] - position[None, :]).to(tl.float32)
        seen = ((j >= low) & (j < end))[:, None] & (j[:, None] <= position[None, :])
        if scoring.window > 0:
            seen = seen & (j[:, None] > position[None, :] - scoring.window)
        s = tl.where(seen, s, float("-inf"))
        now = tl.maximum(top, tl.max(s, 0) * factor)
        p = tl.exp2(s * factor - now[None, :])
        kept = tl.exp2(top - now)
        v = load_tile(values, d, block, SIZE, BLOCK, False, False).to(q.dtype)
        sums = tl.dot(tl.trans(v), p.to(v.dtype), sums * kept[None, :], input_precision=PRECISION)
        top, total = now, total * kept + tl.sum(p, 0)
    return top, total, sums


@triton.jit
def _init(sinks, head, there, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the maximum, total and sums of an online softmax before its first key, as `init_softmax` does."""
    top, total, sums = init_softmax(sinks, head, there, ROWS, BLOCK)
    return top, total, tl.trans(sums)


@triton.jit
def _merge(top, total, sums, new_top, new_total, new_sums):
    """Merge one more split into an online softmax; a split without keys changes nothing."""
    now = tl.maximum(top, new_top)
    base = tl.where(now == float("-inf"), 0.0, now)
    kept, new = tl.exp2(top - base), tl.exp2(new_top - base)
    return now, total * kept + new_total * new, sums * kept[None, :] + new_sums * new[None, :]


@triton.jit
def _divide(sums, total):
    """Divide, without the sign of zeros: keys that are not seen may have changed it."""
    return sums / total[None, :] + 0.0


@triton.jit(do_not_specialize=["num_kv_splits", "table_row"])
def _exact_attention(
    q,
    cache,
    table,
    query_start,
    lengths,
    tiles,
    out,
    splits,
    scoring,
    q_row,
    table_row,
    num_kv_splits,
    num_heads,
    WINDOW: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS // GROUP queries of one sequence, or its only one, for the query heads of one KV head: all splits in order,
    or one of them into `splits`."""
    wait_for_previous(PDL)
    tile, h = tl.program_id(0), tl.program_id(1)
    if tiles is None:
        s = tile.to(tl.int64)
        from_token, begin, count = 0, tile, 1
    else:
        s, from_token = tl.load(tiles + 2 * tile).to(tl.int64), tl.load(tiles + 2 * tile + 1)
        begin = tl.load(query_start + s)
        count = tl.load(query_start + s + 1) - begin
    length = tl.load(lengths + s)
    r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    token = from_token + r // GROUP
    there = (r < ROWS // GROUP * GROUP) & (token < count)
    head = h * GROUP + r % GROUP
    first = length - count + from_token
    position = length - count + token
    inside = there[:, None] & (d < SIZE)[None, :]
    row = (begin + token).to(tl.int64)
    end = tl.minimum(length, first + ROWS // GROUP)
    low = tl.maximum(0, first - WINDOW + 1) if WINDOW else tl.minimum(0, length)
    slope = load_slopes(scoring.alibi, head, there)
    blocks = table + s * table_row
    masks = Scoring(scoring.scale, scoring.softcap, WINDOW, None, None)
    query = tl.load(q + (row * q_row + head * SIZE)[:, None] + d[None, :], mask=inside, other=0.0)
    query = cast_query(query, cache.k)
    top, total, sums = _init(scoring.sinks if splits.sums is None else None, head, there, ROWS, BLOCK)
    if splits.sums is None:
        for split in range(low // SPLIT, tl.cdiv(end, SPLIT)):
            new_top, new_total, new_sums = _init(None, head, there, ROWS, BLOCK)
            new_top, new_total, new_sums = _attend(
                query,
                new_top,
                new_total,
                new_sums,
                tl.maximum(split * SPLIT, low // NUM * NUM),
                low,
                tl.minimum(split * SPLIT + SPLIT, end),
                blocks,
                cache,
                h,
                position,
                slope,
                masks,
                P,
                SIZE,
                BLOCK,
                NUM,
                PRECISION,
            )
            top, total, sums = _merge(top, total, sums, new_top, new_total, new_sums)
        y = _divide(sums, total).to(out.dtype.element_ty)
        tl.store(out + (row * num_heads + head)[None, :] * SIZE + d[:, None], y, mask=tl.trans(inside))
    else:
        split = tl.program_id(2)
        start = tl.maximum(split * SPLIT, low // NUM * NUM)
        stop = tl.minimum(split * SPLIT + SPLIT, end)
        if start < stop:
            top, total, sums = _attend(
                query,
                top,
                total,
                sums,
                start,
                low,
                stop,
                blocks,
                cache,
                h,
                position,
                slope,
                masks,
                P,
                SIZE,
                BLOCK,
                NUM,
                PRECISION,
            )
            at = (s * num_kv_splits + split) * num_heads + head
            tl.store(splits.tops + 2 * at, top, mask=there)
            tl.store(splits.tops + 2 * at + 1, total, mask=there)
            tl.store(splits.sums + at[None, :] * SIZE + d[:, None], sums, mask=tl.trans(inside))


@triton.jit(do_not_specialize=["num_kv_splits"])
def merge_in_order(
    splits,
    lengths,
    sinks,
    out,
    num_kv_splits,
    num_heads,
    WINDOW: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the splits of one head of a sequence with one query."""
    wait_for_previous(PDL)
    s, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + s)
    one, d = tl.arange(0, 1), tl.arange(0, BLOCK)[:, None]
    low = tl.maximum(0, length - WINDOW) if WINDOW else tl.minimum(0, length)
    top, total, sums = _init(sinks, h + one, one == 0, 1, BLOCK)
    for split in tl.range(low // SPLIT, tl.cdiv(length, SPLIT), num_stages=3):
        at = (s * num_kv_splits + split) * num_heads + h + one
        new_top, new_total = tl.load(splits.tops + 2 * at), tl.load(splits.tops + 2 * at + 1)
        new_sums = tl.load(splits.sums + at[None, :] * SIZE + d, mask=d < SIZE, other=0.0)
        top, total, sums = _merge(top, total, sums, new_top, new_total, new_sums)
    y = _divide(sums, total).to(out.dtype.element_ty)
    tl.store(out + (s * num_heads + h + one)[None, :] * SIZE + d, y, mask=d < SIZE)


def _tile_rows(num_heads: int, num_kv_heads: int) -> int:
    return max(MIN_EXACT_ATTENTION_ROWS, power_of_2(num_heads // num_kv_heads))


def count_splits(num_sequences: int, longest: int, num_kv_heads: int) -> int:
    """Return how many KV splits of single queries run side by side, a power of 2 so that few steps are captured; 1 if
    each program reads all of its sequence's splits."""
    if num_sequences * num_kv_heads >= MIN_EXACT_ATTENTION_PROGRAMS:
        return 1
    return power_of_2(cdiv(max(1, longest), EXACT_SPLIT_POSITIONS))


def _single_rows(q: Tensor, num_heads: int, num_kv_heads: int) -> int:
    """Rows of a tile with one query. Only Hopper's instructions, which want 64 keys, are the same for any number."""
    if is_hopper(q.device) and q.itemsize == 2 and q.shape[2] <= MAX_FULL_TILE_HEAD_SIZE:
        return max(MIN_EXACT_SINGLE_ROWS, power_of_2(num_heads // num_kv_heads))
    return _tile_rows(num_heads, num_kv_heads)


def tile_tokens(num_heads: int, num_kv_heads: int) -> int:
    """Return how many queries of a sequence a tile holds."""
    return _tile_rows(num_heads, num_kv_heads) // (num_heads // num_kv_heads)


@attention.impl("cuda", exact=True)
def _body(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    work: Work | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Each sequence reads a shared prefix for itself; a tile of the step has at most `tile_tokens` queries. More than
    one KV split of `work` are enough for the longest sequence (`count_splits`)."""
    if window < 0 or not can_read(k_cache, v_cache, k_scale):
        raise ValueError("deterministic attention on a GPU needs keys as [N, K, P, D], no int8 scales, no chunks")
    q = compact_heads(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.shape[0]:
        return out
    num_heads, (_, num_kv_heads, size, block_size) = q.shape[1], k_cache.shape
    if work is None:
        work = make_work(query_start, tile_tokens(num_heads, num_kv_heads))
    is_float32 = q.dtype == torch.float32
    block = max(16, power_of_2(size))
    cache, scoring = cache_args(k_cache, v_cache), Scoring(scale, softcap or None, 0, alibi, sinks)
    sizes = num_heads, window, block_size, num_heads // num_kv_heads
    keys = 32 if is_float32 or block > MAX_FULL_TILE_HEAD_SIZE else 64
    shape = (size, block, keys, EXACT_SPLIT_POSITIONS, dot_precision(q.dtype))
    options = {"num_warps": 4, "num_stages": 1 if is_float32 else 2, "enable_fp_fusion": False, **pdl_options(q)}
    strides, no_splits = (q.stride(0), table.stride(0)), Splits(None, None)
    if work.num_single:
        num_kv_splits, splits, grid = work.num_kv_splits, no_splits, (work.num_single, num_kv_heads)
        if num_kv_splits > 1 and 4 * work.num_single * num_kv_splits * num_heads * size <= MAX_EXACT_SPLIT_BYTES:
            splits = make_splits(work.num_single, num_kv_splits, num_heads, size, q.device)
            grid = *grid, num_kv_splits  # type: ignore[assignment]
        _exact_attention[grid](
            q,
            cache,
            table,
            query_start,
            work.find_lengths(lengths),
            None,
            out,
            splits,
            scoring,
            *strides,
            num_kv_splits,
            *sizes,
            _single_rows(q, num_heads, num_kv_heads),
            *shape,
            **options,
        )
        if splits.sums is not None:
            merge_in_order[(work.num_single, num_heads)](
                splits,
                work.find_lengths(lengths),
                sinks,
                out,
                num_kv_splits,
                num_heads,
                window,
                size,
                block,
                EXACT_SPLIT_POSITIONS,
                num_warps=1,
                enable_fp_fusion=False,
                **pdl_options(q),
            )
    if work.tiles is not None and len(work.tiles):
        rows = _tile_rows(num_heads, num_kv_heads)
        tiles, given = (len(work.tiles), num_kv_heads), (q, cache, table, query_start, lengths, work.tiles)
        _exact_attention[tiles](*given, out, no_splits, scoring, *strides, 0, *sizes, rows, *shape, **options)
    return out
