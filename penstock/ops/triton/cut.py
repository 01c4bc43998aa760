"""Which tokens of a row may be drawn: everything over a bound, and of what is equal to it the first few."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.ops.triton.launch import await_others
from penstock.ops.triton.search import LOWEST, above, gathered, nth_equal, reaching, weighed
from penstock.ops.wishes import MIN_P, TOP_K, TOP_P

_TOP_K, _TOP_P, _MIN_P = tl.constexpr(TOP_K), tl.constexpr(TOP_P), tl.constexpr(MIN_P)
_NEAR = tl.constexpr(8.4)  # in units of the temperature: what weighs less seldom matters to top_p


@triton.jit
def within(x, token, bound, last):
    """x where the row's cut keeps it, else -inf."""
    return tl.where((x > bound) | (x == bound) & (token <= last), x, LOWEST)


@triton.jit
def _narrowed(values, ids, count, whole, k, p, m, total, top, heat, size, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):
    """The bound, and the last token that is kept of those equal to it."""
    bound = tl.where(True, LOWEST, top)
    num, mass, equal = above(values, count, bound, top, heat, m, BLOCK)
    ties = num
    if (k > 0) | (m > 0):
        most = tl.where(k > 0, tl.minimum(k, num), num)
        bound = reaching(values, count, most, bound, top, heat, m, True, PIVOTS, BLOCK)
        num, mass, equal = above(values, count, bound, top, heat, m, BLOCK)
        ties = most - num
        mass += ties * weighed(bound, top, heat, m)
    else:
        mass = total
    if p < 1:
        needed = p * mass
        second = reaching(values, count, needed, bound, top, heat, m, False, PIVOTS, BLOCK)
        num, before, equal = above(values, count, second, top, heat, m, BLOCK)
        fewest = tl.ceil((needed - before) / weighed(second, top, heat, m))
        fewest = tl.minimum(tl.maximum(fewest, 1.0), equal)
        ties = tl.where(second > bound, fewest, tl.minimum(ties, fewest))
        bound = second
    last = size
    if ties < equal:
        last = nth_equal(values, ids, count, bound, ties.to(tl.int32), whole, BLOCK)
    return bound, last


@triton.jit
def cut(
    edited,
    numbers,
    temperature,
    rows,
    tops,
    sums,
    heads,
    near,
    near_ids,
    bounds,
    lasts,
    size,
    num_pieces,
    num_heads,
    NUM_WISHES: tl.constexpr,
    ROOM: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A row's bound and last token. heads[num_heads] are the largest logits of parts of its pieces: that many of all
    are at least as large as the k-th of them."""
    await_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(rows + row).to(tl.int64)
    k = tl.load(numbers + entry * NUM_WISHES + _TOP_K)
    p = tl.load(numbers + entry * NUM_WISHES + _TOP_P)
    m = tl.load(numbers + entry * NUM_WISHES + _MIN_P)
    heat = tl.load(temperature + entry)
    at = tl.arange(0, PIECES)
    piece_tops = tl.load(tops + row * num_pieces + at, mask=at < num_pieces, other=LOWEST)
    broken = tl.max((piece_tops != piece_tops).to(tl.int32), 0) > 0
    top = tl.max(piece_tops, 0)
    bound, last = tl.where(True, LOWEST, top), size
    if ((k > 0) | (p < 1) | (m > 0)) & (heat > 0) & (top > LOWEST) & (not broken):
        piece_sums = tl.load(sums + row * num_pieces + at, mask=at < num_pieces, other=0.0)
        total = tl.sum(piece_sums * tl.exp((piece_tops - top) / heat), 0)
        floor = top - heat * _NEAR
        suffices = (k > 0) & (k <= num_heads)
        if suffices:
            floor = reaching(heads + row * num_heads, num_heads, k, bound, top, 0.0, 0.0, True, PIVOTS, BLOCK)
        elif m > 0:
            floor = top + heat * (tl.log(m) - 1e-4) - 1e-5 * tl.abs(top)
        values = edited + row * size
        source, ids = near + row * ROOM, near_ids + row * ROOM
        count = gathered(values, tops + row * num_pieces, num_pieces, size, floor, source, ids, ROOM, PIECE, BLOCK)
        enough = count <= ROOM
        if enough & (not suffices) & (m <= 0):
            if k > 0:
                enough = count >= k
            else:
                num, mass, equal = above(source, count, bound, top, heat, m, BLOCK)
                enough = mass >= p * total
        if not enough:
            source, count = values, size
        whole = tl.where(enough, 0, 1)
        bound, last = _narrowed(source, ids, count, whole, k, p, m, total, top, heat, size, PIVOTS, BLOCK)
    tl.store(bounds + row, bound)
    tl.store(lasts + row, last)


@triton.jit
def cut_sums(
    edited, temperature, rows, tops, sums, bounds, lasts, size, num_pieces, PIECE: tl.constexpr, EARLY: tl.constexpr
):
    """The sums of a piece's weights once more, of what the cut keeps."""
    await_others(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bound = tl.load(bounds + row)
    if bound > LOWEST:
        at = row * num_pieces + piece
        top = tl.load(tops + at)
        total = top * 0
        if top >= bound:
            token = piece * PIECE + tl.arange(0, PIECE)
            x = tl.load(edited + row * size + token, mask=token < size, other=LOWEST)
            heat = tl.load(temperature + tl.load(rows + row).to(tl.int64))
            total = tl.sum(tl.exp((within(x, token, bound, tl.load(lasts + row)) - top) / heat), 0)
        else:
            total = tl.where(True, 0.0, total)
        tl.store(sums + at, total)
