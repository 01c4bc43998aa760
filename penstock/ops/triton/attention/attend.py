"""Parts that attention kernels share: arguments, the loop over cached keys, work for a step that brings none."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention.attention import Work
from penstock.ops.triton.numbers import saturate, tanh

LOG2_E = tl.constexpr(1.4426950408889634)
MIN_SCORE = tl.constexpr(-1e30)  # under any score


class Cache(NamedTuple):
    """Keys and values, both [N, K, P, D] in memory, and their strides by block, head and position."""

    k: Any
    v: Any
    k_block: int
    k_head: int
    k_position: int
    v_block: int
    v_head: int
    v_position: int


class PagedStep(NamedTuple):
    """A step's sequences, and the cache that their tables are of."""

    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    query_start: Tensor
    lengths: Tensor


class Scoring(NamedTuple):
    """The way from queries and keys to scores."""

    scale: float
    softcap: float | None
    window: int  # 0: none
    alibi: Any  # slopes [H], or None
    sinks: Any  # scores [H] that take weight but have no value, or None


class Splits(NamedTuple):
    """Partial results of KV splits: sums [S, splits, H, D], and [S, splits, H, 2] maximum and total; or None."""

    sums: Any
    tops: Any


def can_read(k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None) -> bool:
    """Return True if kernels can read this cache: no int8 scales, head dimensions contiguous."""
    return k_scale is None and k_cache.stride(2) == 1 and v_cache.stride(3) == 1


def cache_args(k_cache: Tensor, v_cache: Tensor) -> Cache:
    k, v = k_cache.stride(), v_cache.stride()
    return Cache(k_cache, v_cache, k[0], k[1], k[3], v[0], v[1], v[2])


def make_splits(num_sequences: int, num_kv_splits: int, num_heads: int, size: int, device: torch.device) -> Splits:
    shape = num_sequences, num_kv_splits, num_heads
    return Splits(torch.empty((*shape, size), device=device), torch.empty((*shape, 2), device=device))


def compact_heads(q: Tensor) -> Tensor:
    """Return q[T, H, D] with contiguous heads; rows may be apart."""
    return q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()


def make_work(query_start: Tensor, tile_tokens: int) -> Work:
    """Return work for a step that has none; it waits for the device to read `query_start`."""
    starts = query_start.tolist()
    tiles = [(s, start) for s in range(len(starts) - 1) for start in range(0, starts[s + 1] - starts[s], tile_tokens)]
    return Work(0, torch.tensor(tiles, dtype=torch.int32, device=query_start.device).view(-1, 2))


@triton.jit
def cast_query(q, k_cache):
    """Cast bfloat16 queries to float16 for an FP8 cache: FP8 becomes float16 in one instruction, bfloat16 in four."""
    if k_cache.dtype.element_ty == tl.float8e4nv:  # noqa: SIM102  not every Triton joins them at compile time
        if q.dtype == tl.bfloat16:
            q = saturate(q, tl.float16)
    return q


@triton.jit
def load_slopes(alibi, head, there):
    slope = None
    if alibi is not None:
        slope = tl.load(alibi + head, mask=there, other=0.0)
    return slope


@triton.jit
def score_keys(q, k, j, position, slope, scoring, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Score queries q[M, D] at position[M] over keys k[N, D] at j[N]. Return scores [M, N] and the factor that makes
    them exponents of 2."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    factor = scoring.scale * LOG2_E
    if scoring.softcap is not None:
        s = scoring.softcap * tanh(s * scoring.scale / scoring.softcap)
        factor = LOG2_E * 1.0
    if slope is not None:
        if scoring.softcap is None:
            s *= scoring.scale
            factor = LOG2_E * 1.0
        s += slope[:, None] * (j[None, :] - position[:, None]).to(tl.float32)
    if MASKED:
        seen = j[None, :] <= position[:, None]
        if scoring.window > 0:
            seen = seen & (j[None, :] > position[:, None] - scoring.window)
        s = tl.where(seen, s, float("-inf"))
    return s, factor


@triton.jit
def init_softmax(sinks, head, there, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the maximum, total and sums of an online softmax before its first key; with sinks, it has met those of the
    heads that are `there`. The maximum is finite, so that rows that see none of their first keys need no care."""
    top, total = tl.full((ROWS,), MIN_SCORE, tl.float32), tl.zeros((ROWS,), tl.float32)
    if sinks is not None:
        top = tl.where(there, tl.load(sinks + head, mask=there, other=0.0).to(tl.float32) * LOG2_E, top)
        total = there.to(tl.float32)
    return top, total, tl.zeros((ROWS, BLOCK), tl.float32)


@triton.jit
def update_softmax(s, factor, v, top, total, sums, PRECISION: tl.constexpr):
    """Add scores s[M, N] and their values v[N, D] to an online softmax."""
    now = tl.maximum(top, tl.max(s, 1) * factor)
    p = tl.exp2(s * factor - now[:, None])
    kept = tl.exp2(top - now)
    sums = tl.dot(p.to(v.dtype), v, sums * kept[:, None], input_precision=PRECISION)
    return now, total * kept + tl.sum(p, 1), sums


@triton.jit
def load_blocks(table, j, low, end, P: tl.constexpr, BESIDE: tl.constexpr):
    """Load the block ids of positions low ≤ j < end; blocks before a window belong to others by now."""
    return tl.load(table + j // P, mask=(j >= low) & (j < end), other=-1, cache_modifier=".cg" if BESIDE else "")


@triton.jit
def load_tile(place, d, block, SIZE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, BESIDE: tl.constexpr):
    """Load keys or values [N, BLOCK]; 0 beyond the head's size and where there is no block."""
    if not WHOLE:
        wanted = (block >= 0)[:, None] & (d < SIZE)[None, :]
        x = tl.load(place, mask=wanted, other=0.0, cache_modifier=".cg" if BESIDE else "")
    elif BLOCK > SIZE:
        x = tl.load(place, mask=(d < SIZE)[None, :], other=0.0, cache_modifier=".cg" if BESIDE else "")
    else:
        x = tl.load(place, cache_modifier=".cg" if BESIDE else "")
    return x


@triton.jit
def attend(
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
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    WHOLE: tl.constexpr = False,
    BESIDE: tl.constexpr = False,
    next_blocks=None,
):
    """Continue an online softmax over the keys start … end - 1 of head h, NUM at a time, leaving out those under `low`.

    MASKED applies the causal and window masks. WHOLE promises NUM keys each time, none under `low`. BESIDE reads past
    L1, for a kernel that runs beside another. `next_blocks` are the block ids of the first NUM keys: later ones are
    then loaded one round ahead.
    """
    d = tl.arange(0, BLOCK)
    k_cache, v_cache = cache.k + h * cache.k_head, cache.v + h * cache.v_head
    for begin in range(start, end, NUM):
        j = begin + tl.arange(0, NUM)
        if WHOLE:
            block = tl.load(table + j // P, cache_modifier=".cg" if BESIDE else "").to(tl.int64)
        else:
            there = (j >= low) & (j < end)
            if next_blocks is None:
                block = load_blocks(table, j, low, end, P, BESIDE).to(tl.int64)
            else:
                block = next_blocks.to(tl.int64)
                next_blocks = load_blocks(table, j + NUM, low, end, P, BESIDE)
        keys = k_cache + (block * cache.k_block + (j % P) * cache.k_position)[:, None] + d[None, :]
        values = v_cache + (block * cache.v_block + (j % P) * cache.v_position)[:, None] + d[None, :]
        k = load_tile(keys, d, block, SIZE, BLOCK, WHOLE, BESIDE)
        s, factor = score_keys(q, k.to(q.dtype), j, position, slope, scoring, MASKED, PRECISION)
        if not WHOLE:
            s = tl.where(there[None, :], s, float("-inf"))
        v = load_tile(values, d, block, SIZE, BLOCK, WHOLE, BESIDE)
        top, total, sums = update_softmax(s, factor, v.to(q.dtype), top, total, sums, PRECISION)
    return top, total, sums


@triton.jit
def find_split(first, length, limit, window, split, num_kv_splits, NUM: tl.constexpr):
    """Return the lowest key to read and the bounds of one split of the keys from `first`, or from the window's first,
    up to `limit`, in a sequence of `length`."""
    low = first
    if window > 0:
        low = tl.maximum(0, length - window)
        first = low // NUM * NUM
    share = tl.cdiv(tl.cdiv(limit - first, NUM), num_kv_splits) * NUM
    start = first + split * share
    return low, start, tl.minimum(limit, start + share)


@triton.jit
def store_split(splits, at, there, inside, top, total, sums, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store the partial result of one split at index at[M]."""
    tl.store(splits.tops + 2 * at, top, mask=there)
    tl.store(splits.tops + 2 * at + 1, total, mask=there)
    tl.store(splits.sums + at[:, None] * SIZE + tl.arange(0, BLOCK)[None, :], sums, mask=inside)
