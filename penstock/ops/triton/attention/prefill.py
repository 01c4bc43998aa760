"""Prompt attention in tiles of queries: by Hopper's kernel where it applies and is faster, else by one for any GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention.attention import Work
from penstock.ops.triton import tuning
from penstock.ops.triton.attention.attend import (
    PagedStep,
    Scoring,
    attend,
    cache_args,
    cast_query,
    init_softmax,
    load_slopes,
)
from penstock.ops.triton.launch import dot_precision, has_large_smem
from penstock.ops.triton.sizes import power_of_2
from penstock.ops.triton.tuning import (
    ATTENTION_TILE_ROWS,
    MAX_FULL_TILE_HEAD_SIZE,
    MAX_SHORT_PROMPT,
    MIN_HOPPER_TOKENS,
    tile_options,
)

hopper: Any
try:
    from penstock.ops.triton.attention.hopper import prefill as hopper
except (ImportError, AttributeError):  # a Triton without Gluon, or with another one
    hopper = None


@triton.jit(do_not_specialize=["table_row"])
def _prefill(
    q,
    cache,
    table,
    query_start,
    lengths,
    tiles,
    out,
    scoring,
    q_row,
    table_row,
    num_heads,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ROWS // GROUP queries of one sequence, for the query heads of one KV head."""
    tile, h = tl.program_id(0), tl.program_id(1)
    s, from_token = tl.load(tiles + 2 * tile).to(tl.int64), tl.load(tiles + 2 * tile + 1)
    begin, length = tl.load(query_start + s), tl.load(lengths + s)
    count = tl.load(query_start + s + 1) - begin
    r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    token = from_token + r // GROUP
    there = (r < ROWS // GROUP * GROUP) & (token < count)
    head = h * GROUP + r % GROUP
    first = length - count + from_token
    position = length - count + token
    inside = there[:, None] & (d < SIZE)[None, :]
    row = (begin + token).to(tl.int64)
    query = tl.load(q + (row * q_row + head * SIZE)[:, None] + d[None, :], mask=inside, other=0.0)
    query = cast_query(query, cache.k)
    top, total, sums = init_softmax(scoring.sinks, head, there, ROWS, BLOCK)
    slope = load_slopes(scoring.alibi, head, there)
    start = 0
    low = 0
    if scoring.window > 0:
        low = tl.maximum(0, first - scoring.window + 1)
        start = low // NUM * NUM
        whole = start
    else:
        whole = (first + 1) // NUM * NUM  # keys that every query of the tile sees
        top, total, sums = attend(
            query,
            top,
            total,
            sums,
            start,
            low,
            whole,
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
            False,
            PRECISION,
            True,
        )
    end = tl.minimum(length, first + ROWS // GROUP)
    top, total, sums = attend(
        query,
        top,
        total,
        sums,
        whole,
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
        True,
        PRECISION,
    )
    y = sums / total[:, None]
    tl.store(out + (row * num_heads + head)[:, None] * SIZE + d[None, :], y.to(out.dtype.element_ty), mask=inside)


def tile_shape(q: Tensor, k_cache: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the constants of a kernel whose tiles have ATTENTION_TILE_ROWS rows, from P on, and its launch options."""
    num_heads, (_, num_kv_heads, size, block_size) = q.shape[1], k_cache.shape
    group, block = num_heads // num_kv_heads, max(16, power_of_2(size))
    is_wide = block <= MAX_FULL_TILE_HEAD_SIZE and q.dtype != torch.float32
    rows, precision = max(ATTENTION_TILE_ROWS, power_of_2(group)), dot_precision(q.dtype)
    shape = block_size, group, rows, size, block, 64 if is_wide else 32, precision
    return shape, tile_options(block, q.dtype, has_large_smem(q.device))


def uses_hopper(q: Tensor, step: PagedStep, scoring: Scoring, work: Work) -> bool:
    """Return True if Hopper's kernel can compute the step's tiles, and is likely to be faster."""
    beside = scoring.softcap, scoring.alibi, scoring.sinks
    if hopper is None or scoring.window or any(one is not None for one in beside):
        return False
    if q.shape[1] // step.k_cache.shape[1] not in tuning.HOPPER_GROUPS or q.dtype not in tuning.HOPPER_DTYPES:
        return False
    is_long = q.shape[0] >= MIN_HOPPER_TOKENS if work.longest is None else work.longest > MAX_SHORT_PROMPT
    return is_long and bool(hopper.can_attend(q, step.k_cache, step.v_cache))


def attend_tiles(q: Tensor, out: Tensor, step: PagedStep, scoring: Scoring, work: Work) -> None:
    """Write the results of the step's tiles to `out`."""
    assert work.tiles is not None
    if uses_hopper(q, step, scoring, work):
        hopper.attend_tiles(q, out, step, scoring.scale, work)
        return
    shape, options = tile_shape(q, step.k_cache)
    _prefill[(len(work.tiles), step.k_cache.shape[1])](
        q,
        cache_args(step.k_cache, step.v_cache),
        step.table,
        step.query_start,
        step.lengths,
        work.tiles,
        out,
        scoring,
        q.stride(0),
        step.table.stride(0),
        q.shape[1],
        *shape,
        **options,
    )
