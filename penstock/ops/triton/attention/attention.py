"""Paged attention: decode in KV splits, shared prefixes in tiles of sequences, prompts as prefill.py has it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention.attention import Work, attention
from penstock.ops.triton.attention.attend import (
    PagedStep,
    Scoring,
    Splits,
    attend,
    cache_args,
    can_read,
    cast_query,
    compact_heads,
    find_split,
    init_softmax,
    load_slopes,
    make_splits,
    make_work,
    store_split,
)
from penstock.ops.triton.attention.prefill import attend_tiles, tile_shape
from penstock.ops.triton.launch import (
    dot_precision,
    outlast_previous,
    pdl_options,
    start_beside_previous,
    wait_for_previous,
)
from penstock.ops.triton.sizes import power_of_2
from penstock.ops.triton.tuning import ATTENTION_TILE_ROWS, decode_read_shape


@triton.jit(do_not_specialize=["num_kv_splits", "num_all", "table_row"])
def _decode(
    q,
    cache,
    table,
    lengths,
    skips,
    out,
    splits,
    scoring,
    q_row,
    table_row,
    num_kv_splits,
    num_all,
    num_heads,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """One of `num_kv_splits` KV splits of a sequence with one query, for the query heads of one KV head. BESIDE
    `_shared_prefix` it reads past L1, which is only sure to be right after a wait."""
    if BESIDE:
        start_beside_previous(PDL)
    else:
        wait_for_previous(PDL)
    h, s, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + s, cache_modifier=".cg" if BESIDE else "")
    first = length * 0
    if skips is not None:
        first = tl.load(skips + s, cache_modifier=".cg" if BESIDE else "")
    low, start, end = find_split(first, length, length, scoring.window, split, num_kv_splits, NUM)
    g, d = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    head = h * GROUP + g
    inside = (g < GROUP)[:, None] & (d < SIZE)[None, :]
    top, total, sums = init_softmax(scoring.sinks, head, g < tl.where(split == 0, GROUP, 0), ROWS, BLOCK)
    if start < end:
        query = tl.load(
            q + s * q_row + head[:, None] * SIZE + d[None, :],
            mask=inside,
            other=0.0,
            cache_modifier=".cg" if BESIDE else "",
        )
        query = cast_query(query, cache.k)
        position = tl.zeros((ROWS,), tl.int32) + length - 1
        slope = load_slopes(scoring.alibi, head, g < GROUP)
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
            position,
            slope,
            scoring,
            P,
            SIZE,
            BLOCK,
            NUM,
            scoring.window > 0,
            PRECISION,
            False,
            BESIDE,
        )
    if splits.sums is None:
        y = sums / total[:, None]
        tl.store(out + (s * num_heads + head)[:, None] * SIZE + d[None, :], y.to(out.dtype.element_ty), mask=inside)
    else:
        if skips is not None:
            shares_nothing = g < tl.where(split + first == 0, GROUP, 0)
            for other in range(num_kv_splits, num_all):
                place = splits.tops + 2 * ((s * num_all + other) * num_heads + head)
                tl.store(place, tl.full((ROWS,), float("-inf"), tl.float32), mask=shares_nothing)
        at = (s * num_all + split) * num_heads + head
        store_split(splits, at, g < GROUP, inside, top, total, sums, SIZE, BLOCK)
    if BESIDE:
        outlast_previous(PDL)


@triton.jit(do_not_specialize=["num_kv_splits", "num_all", "table_row"])
def _shared_prefix(
    q,
    cache,
    table,
    lengths,
    members,
    tiles,
    splits,
    scoring,
    q_row,
    table_row,
    num_kv_splits,
    num_all,
    num_heads,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One KV split of the prefix that a tile of sequences shares; it is stored after the sequences' own splits."""
    wait_for_previous(PDL)
    tile, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(tiles + 4 * tile + 1)
    end = tl.load(tiles + 4 * tile + 3)
    share = tl.cdiv(tl.cdiv(end, NUM), num_all - num_kv_splits) * NUM
    start = split * share
    r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    there = (r < ROWS // GROUP * GROUP) & (r // GROUP < count)
    if count > 0:
        member = tl.load(members + tl.load(tiles + 4 * tile) + r // GROUP, mask=there, other=0).to(tl.int64)
        head = h * GROUP + r % GROUP
        inside = there[:, None] & (d < SIZE)[None, :]
        query = tl.load(q + (member * q_row + head * SIZE)[:, None] + d[None, :], mask=inside, other=0.0)
        query = cast_query(query, cache.k)
        top, total, sums = init_softmax(None, head, there, ROWS, BLOCK)
        slope = load_slopes(scoring.alibi, head, there)
        position = tl.load(lengths + member, mask=there, other=1) - 1
        end = tl.minimum(end, start + share)
        whole = end // NUM * NUM
        table += tl.load(tiles + 4 * tile + 2).to(tl.int64) * table_row
        top, total, sums = attend(
            query,
            top,
            total,
            sums,
            start,
            0,
            whole,
            table,
            cache,
            h,
            position,
            slope,
            scoring,
            P,
            SIZE,
            BLOCK,
            NUM,
            False,
            PRECISION,
            True,
        )
        top, total, sums = attend(
            query,
            top,
            total,
            sums,
            tl.maximum(start, whole),
            0,
            end,
            table,
            cache,
            h,
            position,
            slope,
            scoring,
            P,
            SIZE,
            BLOCK,
            NUM,
            False,
            PRECISION,
        )
        at = (member * num_all + num_kv_splits + split) * num_heads + head
        store_split(splits, at, there, inside, top, total, sums, SIZE, BLOCK)


@triton.jit(do_not_specialize=["num_kv_splits"])
def merge_splits(
    splits,
    out,
    num_kv_splits,
    num_heads,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the KV splits of one head of one sequence; a split without keys has no weight."""
    wait_for_previous(PDL)
    s, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, split = tl.arange(0, BLOCK), tl.arange(0, SPLITS)
    at = (s * num_kv_splits + split) * num_heads + h
    top = tl.load(splits.tops + 2 * at, mask=split < num_kv_splits, other=float("-inf"))
    total = tl.load(splits.tops + 2 * at + 1, mask=top > float("-inf"), other=0.0)  # nothing is written there else
    weight = tl.exp2(top - tl.max(top, 0))
    there = (top > float("-inf"))[:, None] & (d < SIZE)[None, :]
    sums = tl.load(splits.sums + at[:, None] * SIZE + d[None, :], mask=there, other=0.0)
    y = tl.sum(sums * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + (s * num_heads + h) * SIZE + d, y.to(out.dtype.element_ty), mask=d < SIZE)


def tile_tokens(num_heads: int, num_kv_heads: int) -> int:
    """Return how many queries of a sequence, or sequences with a shared prefix, a tile holds."""
    return max(1, ATTENTION_TILE_ROWS // (num_heads // num_kv_heads))


@attention.impl("cuda", exact=False)
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
    if window < 0 or not can_read(k_cache, v_cache, k_scale):  # chunks are read on a CPU only
        beside = (scale, window, softcap, alibi, k_scale, v_scale, None, sinks)
        return attention.reference(q, k_cache, v_cache, table, query_start, lengths, *beside)
    q = compact_heads(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.shape[0]:
        return out
    num_heads, (_, num_kv_heads, size, block_size) = q.shape[1], k_cache.shape
    if work is None:
        work = make_work(query_start, tile_tokens(num_heads, num_kv_heads))
    precision = dot_precision(q.dtype)
    group, block = num_heads // num_kv_heads, max(16, power_of_2(size))
    cache, scoring = cache_args(k_cache, v_cache), Scoring(scale, softcap or None, window, alibi, sinks)
    if work.num_single:
        shared = None if window else work.shared
        num_all = work.num_kv_splits + (shared.num_kv_splits if shared else 0)
        splits = Splits(None, None)
        if num_all > 1:
            splits = make_splits(work.num_single, num_all, num_heads, size, q.device)
        if shared:
            shape, options = tile_shape(q, k_cache)
            _shared_prefix[(len(shared.tiles), num_kv_heads, shared.num_kv_splits)](
                q,
                cache,
                table,
                lengths,
                shared.members,
                shared.tiles,
                splits,
                scoring,
                q.stride(0),
                table.stride(0),
                work.num_kv_splits,
                num_all,
                num_heads,
                *shape,
                **options,
                **pdl_options(q),
            )
        read = decode_read_shape(work.num_single, block, q.dtype, k_cache.dtype, shared is not None)
        _decode[(num_kv_heads, work.num_single, work.num_kv_splits)](
            q,
            cache,
            table,
            work.find_lengths(lengths),
            shared and shared.skips,
            out,
            splits,
            scoring,
            q.stride(0),
            table.stride(0),
            work.num_kv_splits,
            num_all,
            num_heads,
            block_size,
            group,
            max(16, power_of_2(group)),
            size,
            block,
            read.num_keys,
            precision,
            BESIDE=shared is not None,
            num_warps=read.num_warps,
            num_stages=read.num_stages,
            **pdl_options(q),
        )
        if splits.sums is not None:
            merge_splits[(work.num_single, num_heads)](
                splits,
                out,
                num_all,
                num_heads,
                size,
                block,
                power_of_2(num_all),
                num_warps=1 if shared else 4,
                **pdl_options(q),
            )
    if work.tiles is not None and len(work.tiles):
        attend_tiles(q, out, PagedStep(k_cache, v_cache, table, query_start, lengths), scoring, work)
    return out
