"""Find a row's likeliest tokens without sorting it."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(float("-inf"))
NO_TOKEN = tl.constexpr(2147483647)
NEAR_TOP = tl.constexpr(8.4)  # times the temperature: what lies further under the top seldom matters to top_p


@triton.jit
def to_sortable(x):
    """Map float32 numbers other than NaN to integers of the same order; both zeros become one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def from_sortable(n):
    """Invert `to_sortable`."""
    bits = n.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weigh(x, top, temp, min_weight):
    """Return exp((x - top) / temp), or 0 where that is under `min_weight`; with temp 0, 1 for each x over -inf."""
    w = tl.exp((x - top) / tl.where(temp > 0, temp, 1.0))
    w = tl.where(w >= min_weight, w, 0.0)
    return tl.where(temp > 0, w, tl.where(x > LOWEST, 1.0, 0.0))


@triton.jit
def find_threshold(
    values, count, needed, low, top, temp, min_weight, IS_COUNT: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Find the largest threshold that values[count] at or over it reach `needed`; `low` if there is none.

    Each value that `weigh` gives more than 0 adds 1 if IS_COUNT, else its weight. No value is over `top`.
    """
    at = tl.arange(0, BLOCK)
    number = (tl.arange(0, PIVOTS) + 1).to(tl.int64)
    first, end = to_sortable(low), to_sortable(top) + 1
    while end - first > 1:
        step = (end - first + PIVOTS - 1) // PIVOTS
        places = first + step * number
        pivots = from_sortable(tl.minimum(places, end))
        sums = tl.zeros((PIVOTS, BLOCK), tl.float32)
        for start in range(0, count, BLOCK):
            x = tl.load(values + start + at, mask=start + at < count, other=LOWEST)
            w = weigh(x, top, temp, min_weight)
            if IS_COUNT:
                w = (w > 0).to(tl.float32)
            sums += tl.where(x[None, :] >= pivots[:, None], w[None, :], 0.0)
        enough = tl.sum(((tl.sum(sums, 1) >= needed) & (places < end)).to(tl.int64), 0)
        end = tl.minimum(end, first + step * (enough + 1))
        first += step * enough
    return from_sortable(first)


@triton.jit
def count_above(values, count, bound, top, temp, min_weight, BLOCK: tl.constexpr):
    """Return how many of values[count] are over `bound`, the sum of their weights, and how many equal it."""
    at = tl.arange(0, BLOCK)
    more = tl.zeros((BLOCK,), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    equal = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        x = tl.load(values + start + at, mask=start + at < count, other=LOWEST)
        w = weigh(x, top, temp, min_weight)
        more += tl.where((x > bound) & (w > 0), 1.0, 0.0)
        mass += tl.where(x > bound, w, 0.0)
        equal += tl.where((x == bound) & (w > 0), 1.0, 0.0)
    return tl.sum(more, 0), tl.sum(mass, 0), tl.sum(equal, 0)


@triton.jit
def find_nth_equal(values, ids, count, bound, n, whole, BLOCK: tl.constexpr):
    """Return the token of the n-th value, from 1, that equals `bound`.

    ids[count] ascend; where the values are a `whole` row they are not read.
    """
    at = tl.arange(0, BLOCK)
    met = n * 0
    token = count * 0 - 1
    num_ids = tl.where(whole > 0, 0, count)
    for start in range(0, count, BLOCK):
        inside = start + at < count
        x = tl.load(values + start + at, mask=inside, other=LOWEST)
        equal = ((x == bound) & inside).to(tl.int32)
        place = met + tl.cumsum(equal, 0)
        listed = tl.load(ids + start + at, mask=start + at < num_ids, other=0)
        this = tl.where(whole > 0, start + at, listed)
        token = tl.maximum(token, tl.max(tl.where((equal > 0) & (place == n), this, -1), 0))
        met += tl.sum(equal, 0)
    return token


@triton.jit
def gather_candidates(
    values,
    tops,
    num_tiles,
    size,
    floor,
    candidates,
    candidate_ids,
    MAX_CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the values at or over `floor` and their tokens as a list; return how many there are.

    tops[num_tiles] are the tiles' largest values. With more than MAX_CANDIDATES not all are written.
    """
    at = tl.arange(0, BLOCK)
    count = size * 0
    for tile in range(0, num_tiles):
        if (tl.load(tops + tile) >= floor) & (count <= MAX_CANDIDATES):
            for start in range(0, TILE, BLOCK):
                token = tile * TILE + start + at
                x = tl.load(values + token, mask=token < size, other=LOWEST).to(tl.float32)
                fits = (x >= floor) & (x > LOWEST)
                place = count + tl.cumsum(fits.to(tl.int32), 0) - 1
                tl.store(candidates + place, x, mask=fits & (place < MAX_CANDIDATES))
                tl.store(candidate_ids + place, token, mask=fits & (place < MAX_CANDIDATES))
                count += tl.sum(fits.to(tl.int32), 0)
    tl.debug_barrier()
    return count
