"""Sort the rows of a grouped product by matrix, in tiles of rows of one matrix; their number is bounded by shapes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.sizes import power_of_2
from penstock.ops.triton.tuning import SORT_BLOCKS

FILL = tl.constexpr(64)  # tiles written at a time


class SortedPairs(NamedTuple):
    """Pairs [P] of a row and a matrix, numbered t · K + k, in the order of matrices; and tiles [n, 3] of them: a
    matrix, -1 for none, the first pair of the tile in that order, and how many. Those without pairs come last."""

    order: Tensor
    tiles: Tensor


@triton.jit
def _load_ids(ids, at, num_pairs, num_matrices):
    """Load the matrices of pairs at[N]; none is one more matrix, a place beyond the last another."""
    matrix = tl.load(ids + at, mask=at < num_pairs, other=-1)
    matrix = tl.where(matrix < 0, num_matrices, matrix)
    return tl.where(at < num_pairs, matrix, num_matrices + 1)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _sort_pairs(
    ids,
    order,
    tiles,
    num_pairs,
    num_tiles,
    num_matrices,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the pairs of one matrix, and its tiles; the last program those of none, and the tiles that are left."""
    wait_for_previous(PDL)
    own, bins, place = tl.program_id(0), tl.arange(0, BINS), tl.arange(0, BLOCK)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        counts += tl.histogram(_load_ids(ids, start + place, num_pairs, num_matrices), BINS)
    count, first = tl.sum(tl.where(bins == own, counts, 0)), tl.sum(tl.where(bins < own, counts, 0))
    used = tl.cdiv(counts, ROWS)
    tile, end = tl.sum(tl.where(bins < own, used, 0)), tl.sum(tl.where(bins <= own, used, 0))
    matrix = tl.where(own == num_matrices, -1, own)
    for begin in range(tile, tl.where(own == num_matrices, num_tiles, end), FILL):
        i = begin + tl.arange(0, FILL)
        inside = i < tl.where(own == num_matrices, num_tiles, end)
        done = (i - tile) * ROWS
        tl.store(tiles + 3 * i, matrix + i * 0, mask=inside)
        tl.store(tiles + 3 * i + 1, first + done, mask=inside)
        tl.store(tiles + 3 * i + 2, tl.minimum(tl.maximum(count - done, 0), ROWS), mask=inside)
    for start in range(0, tl.where(count > 0, num_pairs, 0), BLOCK):
        is_own = _load_ids(ids, start + place, num_pairs, num_matrices) == own
        rank = tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order + first + rank, start + place, mask=is_own)
        first += tl.sum(is_own.to(tl.int32))


def max_tiles(num_pairs: int, num_matrices: int, rows: int) -> int:
    """Bound the tiles of any routing: each matrix has one that is not full, at most, and so has none."""
    return num_pairs // rows + min(num_pairs, num_matrices + 1)


def sort_pairs(ids: Tensor, num_matrices: int, rows: int) -> SortedPairs:
    """Sort the pairs of ids[T, K] into tiles of `rows` at most."""
    num_pairs = ids.numel()
    num_tiles = max_tiles(num_pairs, num_matrices, rows)
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty((num_tiles, 3), dtype=torch.int32, device=ids.device)
    block = next((size for size in SORT_BLOCKS if size >= num_pairs), SORT_BLOCKS[-1])
    _sort_pairs[(num_matrices + 1,)](
        ids,
        order,
        tiles,
        num_pairs,
        num_tiles,
        num_matrices,
        rows,
        power_of_2(num_matrices + 2),
        block,
        num_warps=4,
        **pdl_options(ids),
    )
    return SortedPairs(order, tiles)
