"""Find and apply a row's cut: all tokens over a bound, and the first few of those equal to it."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.ops.sampling.row_params import MIN_P, TOP_K, TOP_P
from penstock.ops.triton.launch import wait_for_previous
from penstock.ops.triton.sampling.search import (
    LOWEST,
    NEAR_TOP,
    count_above,
    find_nth_equal,
    find_threshold,
    gather_candidates,
    weigh,
)

_TOP_K, _TOP_P, _MIN_P = tl.constexpr(TOP_K), tl.constexpr(TOP_P), tl.constexpr(MIN_P)


@triton.jit
def apply_cut(x, token, bound, last):
    """Return x where the row's cut keeps it, else -inf."""
    return tl.where((x > bound) | (x == bound) & (token <= last), x, LOWEST)


@triton.jit
def _find_bound(values, ids, count, whole, k, p, m, total, top, temp, size, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the bound of the cut, and the last token kept of those equal to it."""
    bound = tl.where(True, LOWEST, top)
    num, mass, equal = count_above(values, count, bound, top, temp, m, BLOCK)
    ties = num
    if (k > 0) | (m > 0):
        most = tl.where(k > 0, tl.minimum(k, num), num)
        bound = find_threshold(values, count, most, bound, top, temp, m, True, PIVOTS, BLOCK)
        num, mass, equal = count_above(values, count, bound, top, temp, m, BLOCK)
        ties = most - num
        mass += ties * weigh(bound, top, temp, m)
    else:
        mass = total
    if p < 1:
        needed = p * mass
        second = find_threshold(values, count, needed, bound, top, temp, m, False, PIVOTS, BLOCK)
        num, before, equal = count_above(values, count, second, top, temp, m, BLOCK)
        fewest = tl.ceil((needed - before) / weigh(second, top, temp, m))
        fewest = tl.minimum(tl.maximum(fewest, 1.0), equal)
        ties = tl.where(second > bound, fewest, tl.minimum(ties, fewest))
        bound = second
    last = size
    if ties < equal:
        last = find_nth_equal(values, ids, count, bound, ties.to(tl.int32), whole, BLOCK)
    return bound, last


@triton.jit
def cut(
    edited,
    numbers,
    temperature,
    rows,
    tops,
    sums,
    maxima,
    candidates,
    candidate_ids,
    bounds,
    lasts,
    size,
    num_tiles,
    num_maxima,
    NUM_PARAMS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find a row's bound and last token.

    maxima[num_maxima] are the largest logits of parts of its tiles: at least k logits reach the k-th of them.
    """
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(rows + row).to(tl.int64)
    k = tl.load(numbers + entry * NUM_PARAMS + _TOP_K)
    p = tl.load(numbers + entry * NUM_PARAMS + _TOP_P)
    m = tl.load(numbers + entry * NUM_PARAMS + _MIN_P)
    temp = tl.load(temperature + entry)
    at = tl.arange(0, TILES)
    tile_tops = tl.load(tops + row * num_tiles + at, mask=at < num_tiles, other=LOWEST)
    broken = tl.max((tile_tops != tile_tops).to(tl.int32), 0) > 0
    top = tl.max(tile_tops, 0)
    bound, last = tl.where(True, LOWEST, top), size
    if ((k > 0) | (p < 1) | (m > 0)) & (temp > 0) & (top > LOWEST) & (not broken):
        tile_sums = tl.load(sums + row * num_tiles + at, mask=at < num_tiles, other=0.0)
        total = tl.sum(tile_sums * tl.exp((tile_tops - top) / temp), 0)
        floor = top - temp * NEAR_TOP
        suffices = (k > 0) & (k <= num_maxima)
        if suffices:
            floor = find_threshold(maxima + row * num_maxima, num_maxima, k, bound, top, 0.0, 0.0, True, PIVOTS, BLOCK)
        elif m > 0:
            floor = top + temp * (tl.log(m) - 1e-4) - 1e-5 * tl.abs(top)
        values = edited + row * size
        source, ids = candidates + row * MAX_CANDIDATES, candidate_ids + row * MAX_CANDIDATES
        count = gather_candidates(
            values, tops + row * num_tiles, num_tiles, size, floor, source, ids, MAX_CANDIDATES, TILE, BLOCK
        )
        enough = count <= MAX_CANDIDATES
        if enough & (not suffices) & (m <= 0):
            if k > 0:
                enough = count >= k
            else:
                num, mass, equal = count_above(source, count, bound, top, temp, m, BLOCK)
                enough = mass >= p * total
        if not enough:
            source, count = values, size
        whole = tl.where(enough, 0, 1)
        bound, last = _find_bound(source, ids, count, whole, k, p, m, total, top, temp, size, PIVOTS, BLOCK)
    tl.store(bounds + row, bound)
    tl.store(lasts + row, last)


@triton.jit
def cut_sums(
    edited, temperature, rows, tops, sums, bounds, lasts, size, num_tiles, TILE: tl.constexpr, PDL: tl.constexpr
):
    """Sum a tile's weights again over what the cut keeps."""
    wait_for_previous(PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bound = tl.load(bounds + row)
    if bound > LOWEST:
        at = row * num_tiles + tile
        top = tl.load(tops + at)
        total = top * 0
        if top >= bound:
            token = tile * TILE + tl.arange(0, TILE)
            x = tl.load(edited + row * size + token, mask=token < size, other=LOWEST)
            temp = tl.load(temperature + tl.load(rows + row).to(tl.int64))
            total = tl.sum(tl.exp((apply_cut(x, token, bound, tl.load(lasts + row)) - top) / temp), 0)
        else:
            total = tl.where(True, 0.0, total)
        tl.store(sums + at, total)
