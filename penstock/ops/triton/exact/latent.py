"""Deterministic attention over latents: as over keys and values, in splits of a fixed number of positions.

Tiles have the same shape for one query and for many, so that the same instructions compute both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention.attention import Work
from penstock.ops.attention.latent_attention import latent_attention
from penstock.ops.attention.tree_attention import Tail
from penstock.ops.triton.attention.attend import Splits, init_softmax, make_splits, store_split
from penstock.ops.triton.attention.latent import LatentStep, attend_latents, find_queries, load_queries, prepare_call
from penstock.ops.triton.exact.attention import merge_in_order
from penstock.ops.triton.launch import dot_precision, has_large_smem, is_hopper, pdl_options, wait_for_previous
from penstock.ops.triton.tuning import EXACT_SPLIT_POSITIONS, MAX_EXACT_SPLIT_BYTES, latent_read_shape


@triton.jit
def _merge(top, total, sums, new_top, new_total, new_sums):
    """Merge one more split, as `merge_in_order` does."""
    now = tl.maximum(top, new_top)
    kept, new = tl.exp2(top - now), tl.exp2(new_top - now)
    return now, total * kept + new_total * new, sums * kept[:, None] + new_sums * new[:, None]


@triton.jit(do_not_specialize=["num_kv_splits", "table_row"])
def _exact_latents(
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
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of one sequence's queries: all splits in order, or one of them into `splits`."""
    wait_for_previous(PDL)
    s, row, there, position, end = find_queries(step, tl.program_id(0), tl.program_id(1), num_heads, HEADS, ROWS)
    first, last, d = 0, tl.cdiv(end, SPLIT), tl.arange(0, BLOCK)
    if splits.sums is not None:
        first = tl.program_id(2)
        last = tl.minimum(last, first + 1)
    inside = there[:, None] & (d < RANK)[None, :]
    q, q_rope = load_queries(step, row, there, RANK, ROPE, BLOCK, TURNED)
    top, total, sums = init_softmax(None, None, None, ROWS, BLOCK)
    for split in range(first, last):
        new_top, new_total, new_sums = init_softmax(None, None, None, ROWS, BLOCK)
        new_top, new_total, new_sums = attend_latents(
            q,
            q_rope,
            new_top,
            new_total,
            new_sums,
            split * SPLIT,
            tl.minimum(split * SPLIT + SPLIT, end),
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
        if splits.sums is not None:
            at = (s * num_kv_splits + split) * num_heads + row - s * num_heads
            store_split(splits, at, there, inside, new_top, new_total, new_sums, RANK, BLOCK)
        else:
            top, total, sums = _merge(top, total, sums, new_top, new_total, new_sums)
    if splits.sums is None:
        y = sums / total[:, None] + 0.0  # without the sign of zeros
        tl.store(out + row[:, None] * RANK + d[None, :], y.to(out.dtype.element_ty), mask=inside)


@latent_attention.impl("cuda", exact=True)
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
    """More than one KV split of `work` are enough for the longest sequence (`count_splits`)."""
    if tail is not None:
        raise ValueError("deterministic attention over latents on a GPU takes no trees of draft tokens")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.shape[0]:
        return out
    call, num_heads = prepare_call(q, q_rope, cache, table, query_start, lengths, work), q.shape[1]
    work, tile = call.work, call.tile
    read = latent_read_shape(tile.num_rows, q.itemsize, is_hopper(q.device), has_large_smem(q.device))
    shape = cache.shape[1], tile.num_heads, tile.num_rows, *call.sizes
    sizes = *shape, read.num_keys, dot_precision(q.dtype), EXACT_SPLIT_POSITIONS
    options = {"num_stages": read.num_stages, "enable_fp_fusion": False, **pdl_options(q)}

    def launch(step: LatentStep, splits: Splits, grid: tuple[int, ...], num: int) -> None:
        _exact_latents[grid](
            step, out, splits, scale, table.stride(0), num, num_heads, *sizes, num_warps=read.num_warps, **options
        )

    if work.num_single:
        splits, num = Splits(None, None), work.num_kv_splits
        if num > 1 and 4 * work.num_single * num * num_heads * call.rank <= MAX_EXACT_SPLIT_BYTES:
            splits = make_splits(work.num_single, num, num_heads, call.rank, q.device)
        grid = work.num_single, tile.num_groups, num if splits.sums is not None else 1
        launch(call.single, splits, grid, num)
        if splits.sums is not None:
            merged = 0, call.rank, call.rank_block, EXACT_SPLIT_POSITIONS
            merge_in_order[(work.num_single, num_heads)](
                splits, call.single.lengths, None, out, num, num_heads, *merged, num_warps=1, **options
            )
    if work.tiles is not None and len(work.tiles):
        launch(call.tiled, Splits(None, None), (len(work.tiles), tile.num_groups, 1), 0)
    return out
