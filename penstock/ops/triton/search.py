"""Finding a row's likeliest tokens without sorting it."""

from __future__ import annotations

import triton
import triton.language as tl

PIVOTS = 16
LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def ordered(x):
    """Whole numbers in the order of float32 numbers that are no NaN; the same one for both zeros."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def unordered(n):
    """The number that `ordered` makes this of."""
    bits = n.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weighed(x, top, heat, least):
    """exp((x - top) / heat), or 0 where that is under `least`; with heat 0 everything possible weighs 1."""
    w = tl.exp((x - top) / tl.where(heat > 0, heat, 1.0))
    w = tl.where(w >= least, w, 0.0)
    return tl.where(heat > 0, w, tl.where(x > LOWEST, 1.0, 0.0))


@triton.jit
def reaching(
    values, count, needed, low, top, heat, least, COUNTED: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest number so that values[count] of it and more weigh `needed`; `low`, which is less, if there is none.

    Those count that `weighed` gives more than 0: each as 1 if COUNTED, else as it weighs. None is over `top`.
    """
    at = tl.arange(0, BLOCK)
    number = (tl.arange(0, PIVOTS) + 1).to(tl.int64)
    first, end = ordered(low), ordered(top) + 1
    while end - first > 1:
        step = (end - first + PIVOTS - 1) // PIVOTS
        places = first + step * number
        pivots = unordered(tl.minimum(places, end))
        sums = tl.zeros((PIVOTS, BLOCK), tl.float32)
        for start in range(0, count, BLOCK):
            x = tl.load(values + start + at, mask=start + at < count, other=LOWEST)
            w = weighed(x, top, heat, least)
            if COUNTED:
                w = (w > 0).to(tl.float32)
            sums += tl.where(x[None, :] >= pivots[:, None], w[None, :], 0.0)
        enough = tl.sum(((tl.sum(sums, 1) >= needed) & (places < end)).to(tl.int64), 0)
        end = tl.minimum(end, first + step * (enough + 1))
        first += step * enough
    return unordered(first)


@triton.jit
def above(values, count, bound, top, heat, least, BLOCK: tl.constexpr):
    """Of values[count] over `bound` how many there are and what they weigh, and how many are equal to it."""
    at = tl.arange(0, BLOCK)
    more = tl.zeros((BLOCK,), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    equal = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        x = tl.load(values + start + at, mask=start + at < count, other=LOWEST)
        w = weighed(x, top, heat, least)
        more += tl.where((x > bound) & (w > 0), 1.0, 0.0)
        mass += tl.where(x > bound, w, 0.0)
        equal += tl.where((x == bound) & (w > 0), 1.0, 0.0)
    return tl.sum(more, 0), tl.sum(mass, 0), tl.sum(equal, 0)


@triton.jit
def nth_equal(values, ids, count, bound, n, whole, BLOCK: tl.constexpr):
    """The token of the n-th value, from 1, that is equal to `bound`; ids[count] are ascending, and of no use where the
    values are a `whole` row."""
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
def gathered(
    values, tops, num_pieces, size, floor, near, near_ids, ROOM: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the values of `floor` or more, and their tokens, one after the other; tops[num_pieces] are the largest of
    each PIECE. How many there are: if more than ROOM, not all were written."""
    at = tl.arange(0, BLOCK)
    count = size * 0
    for piece in range(0, num_pieces):
        if (tl.load(tops + piece) >= floor) & (count <= ROOM):
            for start in range(0, PIECE, BLOCK):
                token = piece * PIECE + start + at
                x = tl.load(values + token, mask=token < size, other=LOWEST).to(tl.float32)
                fits = (x >= floor) & (x > LOWEST)
                place = count + tl.cumsum(fits.to(tl.int32), 0) - 1
                tl.store(near + place, x, mask=fits & (place < ROOM))
                tl.store(near_ids + place, token, mask=fits & (place < ROOM))
                count += tl.sum(fits.to(tl.int32), 0)
    tl.debug_barrier()
    return count
