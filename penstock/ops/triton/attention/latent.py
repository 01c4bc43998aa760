"""Attention over latents: one read of a latent serves the scores and the values of all heads in a tile."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention.attention import Work
from penstock.ops.attention.latent_attention import latent_attention
from penstock.ops.attention.latent_write import latent_write
from penstock.ops.attention.tree_attention import Tail
from penstock.ops.triton.attention.attend import (
    LOG2_E,
    Splits,
    find_split,
    init_softmax,
    make_splits,
    make_work,
    store_split,
    update_softmax,
)
from penstock.ops.triton.attention.attention import merge_splits
from penstock.ops.triton.launch import dot_precision, has_large_smem, is_hopper, pdl_options, wait_for_previous
from penstock.ops.triton.numbers import saturate
from penstock.ops.triton.sizes import cdiv, power_of_2
from penstock.ops.triton.tuning import LATENT_TILE_ROWS, SMALL_LATENT_TILE_ROWS, latent_read_shape


class LatentStep(NamedTuple):
    """A step's queries [T, H, R] and [T, H, W - R], its sequences, and the cache [N, P, W] that their tables are of."""

    q: Any
    q_rope: Any
    cache: Any
    table: Any
    query_start: Any
    lengths: Any
    tiles: Any  # [n, 2], a sequence and its first query; None: each sequence has one query
    cache_block: int  # a stride


class LatentTile(NamedTuple):
    """The sizes of a program's queries: some tokens of a sequence, each with so many heads."""

    num_groups: int  # of heads
    num_heads: int  # of a group
    num_rows: int


@triton.jit
def _latent_write(
    latent,
    k_rope,
    cache,
    slots,
    latent_row,
    rope_row,
    cache_block,
    P: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write one token's latent to its slot; slots < 0 are padding."""
    wait_for_previous(PDL)
    t, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    slot = tl.load(slots + t)
    if slot >= 0:
        own = tl.load(latent + t * latent_row + at, mask=at < RANK, other=0.0).to(tl.float32)
        turned = (at >= RANK) & (at < RANK + ROPE)
        rope = tl.load(k_rope + t * rope_row + at - RANK, mask=turned, other=0.0).to(tl.float32)
        place = cache + slot // P * cache_block + slot % P * (RANK + ROPE) + at
        value = tl.where(turned, rope, own)
        tl.store(place, saturate(value, cache.dtype.element_ty), mask=at < RANK + ROPE)


@latent_write.impl("cuda", exact=True)
def _write_body(latent: Tensor, k_rope: Tensor, cache: Tensor, slots: Tensor) -> None:
    num_tokens, rank = latent.shape
    _, size, width = cache.shape
    if num_tokens:
        latent, k_rope = (one if one.stride(1) == 1 else one.contiguous() for one in (latent, k_rope))
        _latent_write[(num_tokens,)](
            latent,
            k_rope,
            cache,
            slots,
            latent.stride(0),
            k_rope.stride(0),
            cache.stride(0),
            size,
            rank,
            width - rank,
            power_of_2(width),
            num_warps=1 if width <= 256 else 4,
            **pdl_options(latent),
        )


@triton.jit
def find_queries(step, tile, group, num_heads, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Return a tile's sequence, the rows of its queries among all [M], which are there, their positions, and one more
    than the last position that any of them sees."""
    if step.tiles is None:
        s = tile.to(tl.int64)
        from_token, begin, count = 0, tile, 1
    else:
        s, from_token = tl.load(step.tiles + 2 * tile).to(tl.int64), tl.load(step.tiles + 2 * tile + 1)
        begin = tl.load(step.query_start + s)
        count = tl.load(step.query_start + s + 1) - begin
    length = tl.load(step.lengths + s)
    r = tl.arange(0, ROWS)
    token, head = from_token + r // HEADS, group * HEADS + r % HEADS
    there = (r < ROWS // HEADS * HEADS) & (token < count) & (head < num_heads)
    end = tl.minimum(length, length - count + from_token + ROWS // HEADS)
    return s, (begin + token).to(tl.int64) * num_heads + head, there, length - count + token, end


@triton.jit
def load_queries(step, row, there, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, TURNED: tl.constexpr):
    """Load both parts of queries row[M]."""
    d, e = tl.arange(0, BLOCK)[None, :], tl.arange(0, TURNED)[None, :]
    q = tl.load(step.q + row[:, None] * RANK + d, mask=there[:, None] & (d < RANK), other=0.0)
    q_rope = tl.load(step.q_rope + row[:, None] * ROPE + e, mask=there[:, None] & (e < ROPE), other=0.0)
    return q, q_rope


@triton.jit
def attend_latents(
    q,
    q_rope,
    top,
    total,
    sums,
    start,
    end,
    table,
    step,
    position,
    scale,
    P: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNED: tl.constexpr,
    NUM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Continue an online softmax of queries over the positions start … end - 1, NUM at a time."""
    d, e = tl.arange(0, BLOCK)[None, :], tl.arange(0, TURNED)[None, :]
    for begin in range(start, end, NUM):
        j = begin + tl.arange(0, NUM)
        there = (j < end)[:, None]
        block = tl.load(table + j // P, mask=j < end, other=0).to(tl.int64)
        place = step.cache + (block * step.cache_block + j % P * (RANK + ROPE))[:, None]
        latent = tl.load(place + d, mask=there & (d < RANK), other=0.0).to(q.dtype)
        turned = tl.load(place + RANK + e, mask=there & (e < ROPE), other=0.0).to(q.dtype)
        s = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        s = tl.dot(q_rope, tl.trans(turned), s, input_precision=PRECISION)
        seen = (j < end)[None, :] & (j[None, :] <= position[:, None])
        s = tl.where(seen, s, float("-inf"))
        top, total, sums = update_softmax(s, scale * LOG2_E, latent, top, total, sums, PRECISION)
    return top, total, sums


@triton.jit(do_not_specialize=["num_kv_splits", "table_row"])
def _latent_attention(
    step,
    out,
    splits,
    scale,
    table_row,
    num_kv_splits,
    num_heads,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNED: tl.constexpr,
    NUM: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of one sequence's queries: its tokens over all they see, or its only one over a KV split."""
    wait_for_previous(PDL)
    s, row, there, position, end = find_queries(step, tl.program_id(0), tl.program_id(1), num_heads, HEADS, ROWS)
    split, start = tl.program_id(2), end * 0
    if splits.sums is not None:
        _, start, end = find_split(end * 0, end, end, 0, split, num_kv_splits, NUM)
    top, total, sums = init_softmax(None, None, None, ROWS, BLOCK)
    if start < end:
        q, q_rope = load_queries(step, row, there, RANK, ROPE, BLOCK, TURNED)
        top, total, sums = attend_latents(
            q,
            q_rope,
            top,
            total,
            sums,
            start,
            end,
            step.table + s * table_row,
            step,
            position,
            scale,
            P,
            RANK,
            ROPE,
            BLOCK,
            TURNED,
            NUM,
            PRECISION,
        )
    d = tl.arange(0, BLOCK)
    inside = there[:, None] & (d < RANK)[None, :]
    if splits.sums is None:
        y = sums / total[:, None]
        tl.store(out + row[:, None] * RANK + d[None, :], y.to(out.dtype.element_ty), mask=inside)
    else:
        at = (s * num_kv_splits + split) * num_heads + row - s * num_heads
        store_split(splits, at, there, inside, top, total, sums, RANK, BLOCK)


def find_tile(num_heads: int, device: torch.device) -> LatentTile:
    """Return the tile of a step with several queries to a sequence."""
    rows = LATENT_TILE_ROWS if has_large_smem(device) else SMALL_LATENT_TILE_ROWS
    groups = cdiv(num_heads, rows)
    return LatentTile(groups, cdiv(num_heads, groups), rows)


def tile_tokens(num_heads: int, device: torch.device) -> int:
    """Return how many queries of a sequence a tile holds."""
    tile = find_tile(num_heads, device)
    return tile.num_rows // tile.num_heads


class LatentCall(NamedTuple):
    """An attention as kernels are launched: over sequences with one query, then over tiles of the others."""

    work: Work
    tile: LatentTile
    single: LatentStep
    tiled: LatentStep
    rank: int
    rank_block: int
    sizes: tuple[int, ...]  # of a latent's parts, and of the blocks that hold them


def prepare_call(
    q: Tensor, q_rope: Tensor, cache: Tensor, table: Tensor, query_start: Tensor, lengths: Tensor, work: Work | None
) -> LatentCall:
    num_heads, rank, rope = q.shape[1], q.shape[2], q_rope.shape[2]
    work = make_work(query_start, tile_tokens(num_heads, q.device)) if work is None else work
    tiled = LatentStep(
        q.contiguous(), q_rope.contiguous(), cache, table, query_start, lengths, work.tiles, cache.stride(0)
    )
    single = tiled._replace(lengths=work.find_lengths(lengths), tiles=None)
    rank_block, rope_block = max(16, power_of_2(rank)), max(16, power_of_2(rope))
    sizes = rank, rope, rank_block, rope_block
    return LatentCall(work, find_tile(num_heads, q.device), single, tiled, rank, rank_block, sizes)


@latent_attention.impl("cuda", exact=False)
def _body(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    table: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    scale: float,
    tail: Tail | None = None,
    work: Work | None = None,
) -> Tensor:
    """A shared prefix is read by each sequence for itself."""
    if tail is not None:
        return latent_attention.reference(q, q_rope, cache, table, query_start, lengths, scale, tail)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.shape[0]:
        return out
    call, num_heads = prepare_call(q, q_rope, cache, table, query_start, lengths, work), q.shape[1]
    work, tile = call.work, call.tile

    def launch(step: LatentStep, rows: int, splits: Splits, grid: tuple[int, ...]) -> None:
        read = latent_read_shape(rows, q.itemsize, is_hopper(q.device), has_large_smem(q.device))
        sizes = cache.shape[1], tile.num_heads, rows, *call.sizes, read.num_keys, dot_precision(q.dtype)
        options = {"num_warps": read.num_warps, "num_stages": read.num_stages, **pdl_options(q)}
        _latent_attention[grid](
            step, out, splits, scale, table.stride(0), work.num_kv_splits, num_heads, *sizes, **options
        )

    if work.num_single:
        splits, num = Splits(None, None), work.num_kv_splits
        if num > 1:
            splits = make_splits(work.num_single, num, num_heads, call.rank, q.device)
        rows = max(16, power_of_2(tile.num_heads))
        launch(call.single, rows, splits, (work.num_single, tile.num_groups, num))
        if num > 1:
            grid, merged = (work.num_single, num_heads), (call.rank, call.rank_block, power_of_2(num))
            merge_splits[grid](splits, out, num, num_heads, *merged, num_warps=4, **pdl_options(q))
    if work.tiles is not None and len(work.tiles):
        launch(call.tiled, tile.num_rows, Splits(None, None), (len(work.tiles), tile.num_groups, 1))
    return out
