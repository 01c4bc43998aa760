"""Paged attention: sequences with one query read the cache in several parts at once, others in tiles of queries."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention import Work, attention
from penstock.ops.triton.launch import await_others, begin_beside, early, is_roomy, outlast
from penstock.ops.triton.numbers import fitted, tanh
from penstock.ops.triton.sizes import power_of_2

LEAST_FEW, FEW = 16, 48  # sequences, of which each is read by one program that has to read more at once
TILE = 128  # rows: tokens times the query heads of a key head
MOST_WIDE = 128  # values of a head, of which more keys are read at once
MOST_REGISTERS = 128  # of a thread, so that two tiles fit into a processor: one multiplies while the other does not
LOG2_E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-1e30)  # under any score


@triton.jit
def _for_cache(q, cache):
    """Queries as they meet that cache's values: an 8-bit float becomes a float16 in one instruction, for which a
    bfloat16 takes four."""
    if cache.dtype.element_ty == tl.float8e4nv:  # noqa: SIM102  not every Triton joins them at compile time
        if q.dtype == tl.bfloat16:
            q = fitted(q, tl.float16)
    return q


@triton.jit
def _scores(q, k, j, position, slope, scale, softcap, window, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Scores [M, N] of queries q[M, D] at position[M] over keys k[N, D] at j[N], and what they are still to be
    multiplied by to be exponents of 2."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    factor = scale * LOG2_E
    if softcap is not None:
        s = softcap * tanh(s * scale / softcap)
        factor = LOG2_E * 1.0
    if slope is not None:
        if softcap is None:
            s *= scale
            factor = LOG2_E * 1.0
        s += slope[:, None] * (j[None, :] - position[:, None]).to(tl.float32)
    if MASKED:
        seen = j[None, :] <= position[:, None]
        if window > 0:
            seen = seen & (j[None, :] > position[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
    return s, factor


@triton.jit
def _taken_in(s, factor, v, most, total, sums, PRECISION: tl.constexpr):
    """Some more scores s[M, N] and their values v[N, D]: the largest score, the weights' total, the values' sums."""
    now = tl.maximum(most, tl.max(s, 1) * factor)
    p = tl.exp2(s * factor - now[:, None])
    kept = tl.exp2(most - now)
    sums = tl.dot(p.to(v.dtype), v, sums * kept[:, None], input_precision=PRECISION)
    return now, total * kept + tl.sum(p, 1), sums


@triton.jit
def _nothing(ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """What `_attend` begins with; the largest score so far is a number, so that a row that sees none of its first keys
    needs no care."""
    return (tl.full((ROWS,), LEAST, tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32))


@triton.jit
def _attend(
    q,
    most,
    total,
    sums,
    start,
    low,
    end,
    table,
    k_cache,
    v_cache,
    position,
    slope,
    scale,
    softcap,
    window,
    k_block,
    k_place,
    v_block,
    v_place,
    P: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    WHOLE: tl.constexpr = False,
    BESIDE: tl.constexpr = False,
    ahead=None,
):
    """Go on over the keys start … end - 1, NUM at a time, those under `low` left out: the largest score, the weights'
    total, the values' sums. WHOLE promises that there are NUM each time, none of them under `low`; BESIDE is as in
    `_single`; `ahead` says where the first NUM lie, and has the others looked up a round before they are read."""
    d = tl.arange(0, BLOCK)
    for begin in range(start, end, NUM):
        j = begin + tl.arange(0, NUM)
        if WHOLE:
            block = tl.load(table + j // P, cache_modifier=".cg" if BESIDE else "").to(tl.int64)
        else:
            there = (j >= low) & (j < end)
            if ahead is None:
                block = _blocks(table, j, low, end, P, BESIDE).to(tl.int64)
            else:
                block = ahead.to(tl.int64)
                ahead = _blocks(table, j + NUM, low, end, P, BESIDE)
        keys = k_cache + (block * k_block + (j % P) * k_place)[:, None] + d[None, :]
        values = v_cache + (block * v_block + (j % P) * v_place)[:, None] + d[None, :]
        k = _loaded(keys, d, block, SIZE, BLOCK, WHOLE, BESIDE)
        s, factor = _scores(q, k.to(q.dtype), j, position, slope, scale, softcap, window, MASKED, PRECISION)
        if not WHOLE:
            s = tl.where(there[None, :], s, float("-inf"))
        v = _loaded(values, d, block, SIZE, BLOCK, WHOLE, BESIDE)
        most, total, sums = _taken_in(s, factor, v.to(q.dtype), most, total, sums, PRECISION)
    return most, total, sums


@triton.jit
def _blocks(table, j, low, end, P: tl.constexpr, BESIDE: tl.constexpr):
    """Where the keys at j lie; what lies before a window is someone else's by now."""
    return tl.load(table + j // P, mask=(j >= low) & (j < end), other=-1, cache_modifier=".cg" if BESIDE else "")


@triton.jit
def _loaded(place, d, block, SIZE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, BESIDE: tl.constexpr):
    """Keys or values [N, BLOCK]; 0 beyond the head's size, and where no block is."""
    if not WHOLE:
        wanted = (block >= 0)[:, None] & (d < SIZE)[None, :]
        x = tl.load(place, mask=wanted, other=0.0, cache_modifier=".cg" if BESIDE else "")
    elif BLOCK > SIZE:
        x = tl.load(place, mask=(d < SIZE)[None, :], other=0.0, cache_modifier=".cg" if BESIDE else "")
    else:
        x = tl.load(place, cache_modifier=".cg" if BESIDE else "")
    return x


@triton.jit
def _part(first, length, limit, window, part, num_parts, NUM: tl.constexpr):
    """Of the keys from `first`, or from the window's, up to `limit` in a sequence of `length`: under which none is
    read, where the part begins and where it ends."""
    low = first
    if window > 0:
        low = tl.maximum(0, length - window)
        first = low // NUM * NUM
    share = tl.cdiv(tl.cdiv(limit - first, NUM), num_parts) * NUM
    start = first + part * share
    return low, start, tl.minimum(limit, start + share)


@triton.jit(do_not_specialize=["num_parts", "num_all", "table_row"])
def _single(
    q,
    k_cache,
    v_cache,
    table,
    lengths,
    skips,
    alibi,
    out,
    parts,
    tops,
    scale,
    softcap,
    window,
    q_row,
    k_block,
    k_head,
    k_place,
    v_block,
    v_head,
    v_place,
    table_row,
    num_parts,
    num_all,
    num_heads,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """One of `num_parts` parts of the keys of a sequence with one query, for the query heads of one key head. BESIDE
    `_common` nothing is read by way of a processor's own cache, which is sure to be right after a wait alone."""
    if BESIDE:
        begin_beside(EARLY)
    else:
        await_others(EARLY)
    h, s, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + s, cache_modifier=".cg" if BESIDE else "")
    first = length * 0
    if skips is not None:
        first = tl.load(skips + s, cache_modifier=".cg" if BESIDE else "")
    low, start, end = _part(first, length, length, window, part, num_parts, NUM)
    g, d = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    head = h * GROUP + g
    inside = (g < GROUP)[:, None] & (d < SIZE)[None, :]
    most, total, sums = _nothing(ROWS, BLOCK)
    if start < end:
        query = tl.load(
            q + s * q_row + head[:, None] * SIZE + d[None, :],
            mask=inside,
            other=0.0,
            cache_modifier=".cg" if BESIDE else "",
        )
        query = _for_cache(query, k_cache)
        position = tl.zeros((ROWS,), tl.int32) + length - 1
        slope = None
        if alibi is not None:
            slope = tl.load(alibi + head, mask=g < GROUP, other=0.0)
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
            position,
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
            BESIDE,
        )
    if parts is None:
        y = sums / total[:, None]
        tl.store(out + (s * num_heads + head)[:, None] * SIZE + d[None, :], y.to(out.dtype.element_ty), mask=inside)
    else:
        if skips is not None:
            shares_nothing = g < tl.where(part + first == 0, GROUP, 0)
            for other in range(num_parts, num_all):
                place = tops + 2 * ((s * num_all + other) * num_heads + head)
                tl.store(place, tl.full((ROWS,), float("-inf"), tl.float32), mask=shares_nothing)
        at = (s * num_all + part) * num_heads + head
        tl.store(tops + 2 * at, most, mask=g < GROUP)
        tl.store(tops + 2 * at + 1, total, mask=g < GROUP)
        tl.store(parts + at[:, None] * SIZE + d[None, :], sums, mask=inside)
    if BESIDE:
        outlast(EARLY)


@triton.jit(do_not_specialize=["num_parts", "num_all", "table_row"])
def _common(
    q,
    k_cache,
    v_cache,
    table,
    lengths,
    members,
    tiles,
    alibi,
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
    num_all,
    num_heads,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One part of the positions that a tile of sequences has in common; it follows the parts of their own."""
    await_others(EARLY)
    tile, h, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(tiles + 4 * tile + 1)
    end = tl.load(tiles + 4 * tile + 3)
    share = tl.cdiv(tl.cdiv(end, NUM), num_all - num_parts) * NUM
    start = part * share
    r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    there = (r < ROWS // GROUP * GROUP) & (r // GROUP < count)
    if count > 0:
        member = tl.load(members + tl.load(tiles + 4 * tile) + r // GROUP, mask=there, other=0).to(tl.int64)
        head = h * GROUP + r % GROUP
        inside = there[:, None] & (d < SIZE)[None, :]
        query = tl.load(q + (member * q_row + head * SIZE)[:, None] + d[None, :], mask=inside, other=0.0)
        query = _for_cache(query, k_cache)
        most, total, sums = _nothing(ROWS, BLOCK)
        slope = None
        if alibi is not None:
            slope = tl.load(alibi + head, mask=there, other=0.0)
        position = tl.load(lengths + member, mask=there, other=1) - 1
        end = tl.minimum(end, start + share)
        whole = end // NUM * NUM
        table += tl.load(tiles + 4 * tile + 2).to(tl.int64) * table_row
        most, total, sums = _attend(
            query,
            most,
            total,
            sums,
            start,
            0,
            whole,
            table,
            k_cache + h * k_head,
            v_cache + h * v_head,
            position,
            slope,
            scale,
            softcap,
            0,
            k_block,
            k_place,
            v_block,
            v_place,
            P,
            SIZE,
            BLOCK,
            NUM,
            False,
            PRECISION,
            True,
        )
        most, total, sums = _attend(
            query,
            most,
            total,
            sums,
            tl.maximum(start, whole),
            0,
            end,
            table,
            k_cache + h * k_head,
            v_cache + h * v_head,
            position,
            slope,
            scale,
            softcap,
            0,
            k_block,
            k_place,
            v_block,
            v_place,
            P,
            SIZE,
            BLOCK,
            NUM,
            False,
            PRECISION,
        )
        at = (member * num_all + num_parts + part) * num_heads + head
        tl.store(tops + 2 * at, most, mask=there)
        tl.store(tops + 2 * at + 1, total, mask=there)
        tl.store(parts + at[:, None] * SIZE + d[None, :], sums, mask=inside)


@triton.jit(do_not_specialize=["num_parts"])
def _joined(
    parts,
    tops,
    out,
    num_parts,
    num_heads,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The parts of one head of one sequence; one without keys has no weight."""
    await_others(EARLY)
    s, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, part = tl.arange(0, BLOCK), tl.arange(0, PARTS)
    at = (s * num_parts + part) * num_heads + h
    top = tl.load(tops + 2 * at, mask=part < num_parts, other=float("-inf"))
    total = tl.load(tops + 2 * at + 1, mask=top > float("-inf"), other=0.0)  # nothing is written there else
    weight = tl.exp2(top - tl.max(top, 0))
    there = (top > float("-inf"))[:, None] & (d < SIZE)[None, :]
    sums = tl.load(parts + at[:, None] * SIZE + d[None, :], mask=there, other=0.0)
    y = tl.sum(sums * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + (s * num_heads + h) * SIZE + d, y.to(out.dtype.element_ty), mask=d < SIZE)


@triton.jit(do_not_specialize=["table_row"])
def _tile(
    q,
    k_cache,
    v_cache,
    table,
    query_start,
    lengths,
    tiles,
    alibi,
    out,
    scale,
    softcap,
    window,
    q_row,
    k_block,
    k_head,
    k_place,
    v_block,
    v_head,
    v_place,
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
    """ROWS // GROUP queries of one sequence, for the query heads of one key head."""
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
    query = _for_cache(query, k_cache)
    most, total, sums = _nothing(ROWS, BLOCK)
    slope = None
    if alibi is not None:
        slope = tl.load(alibi + head, mask=there, other=0.0)
    start = 0
    low = 0
    if window > 0:
        low = tl.maximum(0, first - window + 1)
        start = low // NUM * NUM
        whole = start
    else:
        whole = (first + 1) // NUM * NUM  # keys that every query of the tile sees
        most, total, sums = _attend(
            query,
            most,
            total,
            sums,
            start,
            low,
            whole,
            table + s * table_row,
            k_cache + h * k_head,
            v_cache + h * v_head,
            position,
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
            False,
            PRECISION,
            True,
        )
    end = tl.minimum(length, first + ROWS // GROUP)
    most, total, sums = _attend(
        query,
        most,
        total,
        sums,
        whole,
        low,
        end,
        table + s * table_row,
        k_cache + h * k_head,
        v_cache + h * v_head,
        position,
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
        True,
        PRECISION,
    )
    y = sums / total[:, None]
    tl.store(out + (row * num_heads + head)[:, None] * SIZE + d[None, :], y.to(out.dtype.element_ty), mask=inside)


def tile_tokens(num_heads: int, num_kv_heads: int) -> int:
    """Queries of one sequence in a tile, or sequences that have positions in common."""
    return max(1, TILE // (num_heads // num_kv_heads))


def _stages(q: Tensor, block: int) -> int:
    """A tile of wide heads with keys read ahead takes more than the 99 KiB that Ada has."""
    return 1 if q.dtype == torch.float32 or (block > MOST_WIDE and not is_roomy(q.device)) else 2


def _reads(num_single: int, block: int, dtype: torch.dtype, is_shared: bool = False) -> tuple[int, int]:
    """Keys at once and stages of a single query's reading, measured on an H200."""
    if dtype == torch.float32:
        return (64 if block <= MOST_WIDE else 32), 1
    if block > MOST_WIDE:
        return 32, 3
    return (32 if is_shared else 128 if LEAST_FEW <= num_single <= FEW else 64), 2


def _tile_options(q: Tensor, block: int) -> dict[str, Any]:
    """Of a kernel that computes a tile."""
    limit = {"maxnreg": MOST_REGISTERS} if q.dtype != torch.float32 and block <= MOST_WIDE else {}
    return {"num_warps": 8, "num_stages": _stages(q, block), **limit}


def make_work(query_start: list[int], num_heads: int, num_kv_heads: int, device: torch.device) -> Work:
    """For a step of which only the numbers on the device are at hand; it waits for them."""
    step = tile_tokens(num_heads, num_kv_heads)
    tiles = [
        (s, start) for s in range(len(query_start) - 1) for start in range(0, query_start[s + 1] - query_start[s], step)
    ]
    return Work(0, torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 2))


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
) -> Tensor:
    if k_scale is not None or k_cache.stride(2) != 1 or v_cache.stride(3) != 1:
        return attention.reference(
            q, k_cache, v_cache, table, query_start, lengths, scale, window, softcap, alibi, k_scale, v_scale
        )
    q = q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.shape[0]:
        return out
    num_heads, (_, num_kv_heads, size, block_size) = q.shape[1], k_cache.shape
    if work is None:
        work = make_work(query_start.tolist(), num_heads, num_kv_heads, q.device)
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    group, block = num_heads // num_kv_heads, max(16, power_of_2(size))
    strides = (
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(3),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        table.stride(0),
    )
    cap = softcap or None
    num = 64 if block <= MOST_WIDE and q.dtype != torch.float32 else 32
    if work.num_single:
        parts = tops = None
        shared = None if window else work.shared
        num_all = work.num_parts + (shared.num_parts if shared else 0)
        if num_all > 1:
            parts = torch.empty((work.num_single, num_all, num_heads, size), device=q.device)
            tops = torch.empty((work.num_single, num_all, num_heads, 2), device=q.device)
        if shared:
            _common[(len(shared.tiles), num_kv_heads, shared.num_parts)](
                q,
                k_cache,
                v_cache,
                table,
                lengths,
                shared.members,
                shared.tiles,
                alibi,
                parts,
                tops,
                scale,
                cap,
                q.stride(0),
                *strides,
                work.num_parts,
                num_all,
                num_heads,
                block_size,
                group,
                max(TILE, power_of_2(group)),
                size,
                block,
                num,
                precision,
                **_tile_options(q, block),
                **early(q),
            )
        at_once, num_stages = _reads(work.num_single, block, q.dtype, shared is not None)
        _single[(num_kv_heads, work.num_single, work.num_parts)](
            q,
            k_cache,
            v_cache,
            table,
            lengths,
            shared and shared.skips,
            alibi,
            out,
            parts,
            tops,
            scale,
            cap,
            window,
            q.stride(0),
            *strides,
            work.num_parts,
            num_all,
            num_heads,
            block_size,
            group,
            max(16, power_of_2(group)),
            size,
            block,
            at_once,
            precision,
            BESIDE=shared is not None,
            num_warps=4,
            num_stages=num_stages,
            **early(q),
        )
        if parts is not None:
            _joined[(work.num_single, num_heads)](
                parts,
                tops,
                out,
                num_all,
                num_heads,
                size,
                block,
                power_of_2(num_all),
                num_warps=1 if shared else 4,
                **early(q),
            )
    if work.tiles is not None and len(work.tiles):
        _tile[(len(work.tiles), num_kv_heads)](
            q,
            k_cache,
            v_cache,
            table,
            query_start,
            lengths,
            work.tiles,
            alibi,
            out,
            scale,
            cap,
            window,
            q.stride(0),
            *strides,
            num_heads,
            block_size,
            group,
            max(TILE, power_of_2(group)),
            size,
            block,
            num,
            precision,
            **_tile_options(q, block),
        )
    return out
