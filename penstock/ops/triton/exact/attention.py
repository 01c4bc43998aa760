"""Attention in parts of so many positions each, begun afresh and joined in order.

Parts and the tiles of keys in them begin at multiples of their size, whoever asks. One query and a tile of them take as
many rows of the same instructions; keys that a query does not see change nothing of what it gets.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention import Work, attention
from penstock.ops.triton.attention import _attend, _for_cache, _nothing
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.sizes import cdiv, power_of_2

LEAST_ROWS = 64  # of a tile: tokens times the query heads of a key head
PART = 512  # positions
PROGRAMS = 264  # if there are fewer, parts are computed side by side
MOST_BYTES = 1 << 28  # of parts that are


@triton.jit
def _join(most, total, sums, top, weight, values):
    """What is known and one part more; a part without keys changes nothing."""
    now = tl.maximum(most, top)
    base = tl.where(now == float("-inf"), 0.0, now)
    kept, new = tl.exp2(most - base), tl.exp2(top - base)
    return now, total * kept + weight * new, sums * kept[:, None] + values * new[:, None]


@triton.jit
def _divided(sums, total):
    """A zero has no sign: keys that are not seen may have changed it."""
    return sums / total[:, None] + 0.0


@triton.jit(do_not_specialize=["num_parts", "table_row"])
def _exact(
    q,
    k_cache,
    v_cache,
    table,
    query_start,
    lengths,
    tiles,
    alibi,
    out,
    parts,
    tops,
    scale,
    softcap,
    q_row,
    k_block,
    k_head,
    k_place,
    v_block,
    v_head,
    v_place,
    table_row,
    num_parts,
    num_heads,
    WINDOW: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ROWS // GROUP queries of one sequence, or the only one of it, for the query heads of one key head: all parts, or
    one of them."""
    await_others(EARLY)
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
    slope = None
    if alibi is not None:
        slope = tl.load(alibi + head, mask=there, other=0.0)
    blocks, keys, values = table + s * table_row, k_cache + h * k_head, v_cache + h * v_head
    query = tl.load(q + (row * q_row + head * SIZE)[:, None] + d[None, :], mask=inside, other=0.0)
    query = _for_cache(query, k_cache)
    most, total, sums = _nothing(ROWS, BLOCK)
    if parts is None:
        for part in range(low // PART, tl.cdiv(end, PART)):
            top, weight, found = _nothing(ROWS, BLOCK)
            top, weight, found = _attend(
                query,
                top,
                weight,
                found,
                tl.maximum(part * PART, low // NUM * NUM),
                low,
                tl.minimum(part * PART + PART, end),
                blocks,
                keys,
                values,
                position,
                slope,
                scale,
                softcap,
                WINDOW,
                k_block,
                k_place,
                v_block,
                v_place,
                P,
                SIZE,
                BLOCK,
                NUM,
                True,
                PRECISION,
            )
            most, total, sums = _join(most, total, sums, top, weight, found)
        y = _divided(sums, total)
        tl.store(out + (row * num_heads + head)[:, None] * SIZE + d[None, :], y.to(out.dtype.element_ty), mask=inside)
    else:
        part = tl.program_id(2)
        start = tl.maximum(part * PART, low // NUM * NUM)
        stop = tl.minimum(part * PART + PART, end)
        if start < stop:
            most, total, sums = _attend(
                query,
                most,
                total,
                sums,
                start,
                low,
                stop,
                blocks,
                keys,
                values,
                position,
                slope,
                scale,
                softcap,
                WINDOW,
                k_block,
                k_place,
                v_block,
                v_place,
                P,
                SIZE,
                BLOCK,
                NUM,
                True,
                PRECISION,
            )
            at = (s * num_parts + part) * num_heads + head
            tl.store(tops + 2 * at, most, mask=there)
            tl.store(tops + 2 * at + 1, total, mask=there)
            tl.store(parts + at[:, None] * SIZE + d[None, :], sums, mask=inside)


@triton.jit(do_not_specialize=["num_parts"])
def _in_order(
    parts,
    tops,
    lengths,
    out,
    num_parts,
    num_heads,
    WINDOW: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The parts of one head of a sequence with one query."""
    await_others(EARLY)
    s, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + s)
    one, d = tl.arange(0, 1), tl.arange(0, BLOCK)[None, :]
    low = tl.maximum(0, length - WINDOW) if WINDOW else tl.minimum(0, length)
    most, total, sums = _nothing(1, BLOCK)
    for part in tl.range(low // PART, tl.cdiv(length, PART), num_stages=3):
        at = (s * num_parts + part) * num_heads + h + one
        top, weight = tl.load(tops + 2 * at), tl.load(tops + 2 * at + 1)
        found = tl.load(parts + at[:, None] * SIZE + d, mask=d < SIZE, other=0.0)
        most, total, sums = _join(most, total, sums, top, weight, found)
    y = _divided(sums, total)
    tl.store(out + (s * num_heads + h + one)[:, None] * SIZE + d, y.to(out.dtype.element_ty), mask=d < SIZE)


def rows_of_tile(num_heads: int, num_kv_heads: int) -> int:
    return max(LEAST_ROWS, int(power_of_2(num_heads // num_kv_heads)))


def tile_tokens(num_heads: int, num_kv_heads: int) -> int:
    """Queries of one sequence in a tile."""
    return rows_of_tile(num_heads, num_kv_heads) // (num_heads // num_kv_heads)


def make_work(query_start: list[int], num_heads: int, num_kv_heads: int, device: torch.device) -> Work:
    """For a step of which only the numbers on the device are at hand; it waits for them."""
    step = tile_tokens(num_heads, num_kv_heads)
    tiles = [
        (s, start) for s in range(len(query_start) - 1) for start in range(0, query_start[s + 1] - query_start[s], step)
    ]
    return Work(0, torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 2))


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
) -> Tensor:
    """Prefixes in common are read by each sequence; a step's tiles have `tile_tokens` queries at most."""
    if k_scale is not None or k_cache.stride(2) != 1 or v_cache.stride(3) != 1:
        raise ValueError("exact attention on a GPU reads keys that lie like values, without scales")
    q = q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.shape[0]:
        return out
    num_heads, (_, num_kv_heads, size, block_size) = q.shape[1], k_cache.shape
    if work is None:
        work = make_work(query_start.tolist(), num_heads, num_kv_heads, q.device)
    is_long = q.dtype == torch.float32
    block = max(16, power_of_2(size))
    strides = (
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(3),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        table.stride(0),
    )
    shape = (
        num_heads,
        window,
        block_size,
        num_heads // num_kv_heads,
        rows_of_tile(num_heads, num_kv_heads),
        size,
        block,
        32 if is_long or block > 128 else 64,
        PART,
        "ieee" if is_long else "tf32",
    )
    options = {"num_warps": 4, "num_stages": 1 if is_long else 2, "enable_fp_fusion": False, **early(q)}
    if work.num_single:
        num_parts = cdiv(table.shape[1] * block_size, PART)
        parts = tops = None
        grid: tuple[int, ...] = work.num_single, num_kv_heads
        if (
            num_parts > 1
            and work.num_single * num_kv_heads < PROGRAMS
            and 4 * work.num_single * num_parts * num_heads * size <= MOST_BYTES
        ):
            parts = torch.empty((work.num_single, num_parts, num_heads, size), device=q.device)
            tops = torch.empty((work.num_single, num_parts, num_heads, 2), device=q.device)
            grid = *grid, num_parts
        _exact[grid](
            q,
            k_cache,
            v_cache,
            table,
            query_start,
            lengths,
            None,
            alibi,
            out,
            parts,
            tops,
            scale,
            softcap or None,
            q.stride(0),
            *strides,
            num_parts,
            *shape,
            **options,
        )
        if parts is not None:
            _in_order[(work.num_single, num_heads)](
                parts,
                tops,
                lengths,
                out,
                num_parts,
                num_heads,
                window,
                size,
                block,
                PART,
                num_warps=1,
                enable_fp_fusion=False,
                **early(q),
            )
    if work.tiles is not None and len(work.tiles):
        _exact[(len(work.tiles), num_kv_heads)](
            q,
            k_cache,
            v_cache,
            table,
            query_start,
            lengths,
            work.tiles,
            alibi,
            out,
            None,
            None,
            scale,
            softcap or None,
            q.stride(0),
            *strides,
            0,
            *shape,
            **options,
        )
    return out
