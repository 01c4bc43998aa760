"""Samplers that change which tokens of a row may be drawn, before the cut and after it."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.ops.extras import (
    DRY_MULTIPLIER,
    DYNATEMP_EXPONENT,
    DYNATEMP_RANGE,
    LEAST_HEAT,
    N_SIGMA,
    NUM_EXTRAS,
    XTC_PROBABILITY,
    XTC_THRESHOLD,
)
from penstock.ops.sample import GOLDEN
from penstock.ops.triton.cut import within
from penstock.ops.triton.launch import await_others
from penstock.ops.triton.numbers import mixed
from penstock.ops.triton.search import LOWEST

_DRY, _N_SIGMA, _NUM_EXTRAS = tl.constexpr(DRY_MULTIPLIER), tl.constexpr(N_SIGMA), tl.constexpr(NUM_EXTRAS)
_RANGE, _EXPONENT, _LEAST_HEAT = (
    tl.constexpr(DYNATEMP_RANGE),
    tl.constexpr(DYNATEMP_EXPONENT),
    tl.constexpr(LEAST_HEAT),
)
_PROBABILITY, _THRESHOLD = tl.constexpr(XTC_PROBABILITY), tl.constexpr(XTC_THRESHOLD)
_GOLDEN = tl.constexpr(GOLDEN)
NOWHERE = tl.constexpr(2147483647)


@triton.jit
def measure(edited, rows, extras, moments, size, num_pieces, PIECE: tl.constexpr, EARLY: tl.constexpr):
    """Reduce one piece of a row to the count of finite logits, their mean, the sum of squares about it, and the
    maximum."""
    await_others(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    asked = extras + tl.load(rows + row).to(tl.int64) * _NUM_EXTRAS
    if (tl.load(asked + _DRY) > 0) | (tl.load(asked + _N_SIGMA) > 0):
        token = piece * PIECE + tl.arange(0, PIECE)
        x = tl.load(edited + row * size + token, mask=token < size, other=LOWEST)
        possible = x > LOWEST
        count = tl.sum(possible.to(tl.float32), 0)
        mean = tl.sum(tl.where(possible, x, 0.0), 0) / tl.maximum(count, 1.0)
        apart = tl.where(possible, x - mean, 0.0)
        at = moments + (row * num_pieces + piece) * 4
        tl.store(at, count)
        tl.store(at + 1, mean)
        tl.store(at + 2, tl.sum(apart * apart, 0))
        tl.store(at + 3, tl.max(x, 0))


@triton.jit
def keep_near(
    edited,
    temperature,
    rows,
    extras,
    moments,
    tops,
    sums,
    places,
    heads,
    heats,
    size,
    num_pieces,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Leave out what is too far under a row's largest logit, and look at the piece once more. Every row's temperature
    for the cut is entered: 1 where the one to draw with comes after."""
    await_others(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = tl.load(rows + row).to(tl.int64)
    asked = extras + entry * _NUM_EXTRAS
    heat = tl.load(temperature + entry)
    is_dynamic = (tl.load(asked + _RANGE) > 0) & (heat > 0)
    heat = tl.where(is_dynamic, 1.0, heat)
    if piece == 0:
        tl.store(heats + entry, heat)
    n = tl.load(asked + _N_SIGMA)
    changed = (tl.load(asked + _DRY) > 0) | (n > 0)
    if changed | is_dynamic:
        at = tl.arange(0, PIECES)
        inside = at < num_pieces
        known = tl.load(tops + row * num_pieces + at, mask=inside, other=LOWEST)
        broken = tl.max((known != known).to(tl.int32), 0) > 0
        if not broken:
            token = piece * PIECE + tl.arange(0, PIECE)
            x = tl.load(edited + row * size + token, mask=token < size, other=LOWEST)
            if n > 0:
                told = moments + (row * num_pieces + at) * 4
                counts = tl.load(told, mask=inside, other=0.0)
                means = tl.load(told + 1, mask=inside, other=0.0)
                squares = tl.load(told + 2, mask=inside, other=0.0)
                top = tl.max(tl.load(told + 3, mask=inside, other=LOWEST), 0)
                count = tl.maximum(tl.sum(counts, 0), 1.0)
                mean = tl.sum(counts * means, 0) / count
                apart = means - mean
                deviation = tl.sqrt(tl.sum(squares + counts * apart * apart, 0) / count)
                x = tl.where(x < top - n * deviation, LOWEST, x)
                tl.store(edited + row * size + token, x, mask=token < size)
            _look(x, token, row * num_pieces + piece, heat, tops, sums, places, heads, PIECE, PARTS)


@triton.jit
def _look(x, token, at, heat, tops, sums, places, heads, PIECE: tl.constexpr, PARTS: tl.constexpr):
    """Enter what is known of a piece; one that is nowhere stays so."""
    top = tl.max(x, 0)
    base = tl.where(top == LOWEST, 0.0, top)
    was = tl.load(places + at)
    place = tl.min(tl.where(x == top, token, NOWHERE), 0)
    tl.store(sums + at, tl.sum(tl.exp((x - base) / tl.where(heat > 0, heat, 1.0)), 0))
    tl.store(places + at, tl.where(was == NOWHERE, NOWHERE, place))
    part = tl.arange(0, PARTS)
    tl.store(heads + at * PARTS + part, tl.max(tl.reshape(x, (PARTS, PIECE // PARTS)), 1))
    tl.store(tops + at, top)


@triton.jit
def _meets(keys, positions, row, entry, probability):
    """The row's chance, a number of its own."""
    key, position = tl.load(keys + entry), tl.load(positions + row).to(tl.uint32)
    third = mixed(mixed((key >> 32).to(tl.uint32) ^ mixed(position + _GOLDEN + _GOLDEN)) ^ mixed(key.to(tl.uint32)))
    return (third >> 8).to(tl.float32) * 5.9604644775390625e-08 < probability


@triton.jit
def find_likely(
    edited,
    keys,
    positions,
    rows,
    extras,
    tops,
    sums,
    bounds,
    lasts,
    heats,
    found,
    found_ids,
    size,
    num_pieces,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """XTC: of the tokens of a piece that the cut keeps and that have the threshold's probability or more, how many
    there are, the smallest logit, and the last token with it."""
    await_others(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = tl.load(rows + row).to(tl.int64)
    probability = tl.load(extras + entry * _NUM_EXTRAS + _PROBABILITY)
    heat = tl.load(heats + entry)
    if (probability > 0) & (heat > 0):  # noqa: SIM102  Triton has no short cuts
        if _meets(keys, positions, row, entry, probability):
            at = tl.arange(0, PIECES)
            inside = at < num_pieces
            known = tl.load(tops + row * num_pieces + at, mask=inside, other=LOWEST)
            top = tl.max(known, 0)
            weight = tl.load(sums + row * num_pieces + at, mask=inside, other=0.0) * tl.exp((known - top) / heat)
            needed = tl.load(extras + entry * _NUM_EXTRAS + _THRESHOLD) * tl.sum(weight, 0)
            token = piece * PIECE + tl.arange(0, PIECE)
            x = tl.load(edited + row * size + token, mask=token < size, other=LOWEST)
            x = within(x, token, tl.load(bounds + row), tl.load(lasts + row))
            w = tl.exp((x - top) / heat)
            likely = (w >= needed) & (w > 0)
            least = tl.min(tl.where(likely, x, float("inf")), 0)
            to = row * num_pieces + piece
            tl.store(found + to * 2, tl.sum(likely.to(tl.float32), 0))
            tl.store(found + to * 2 + 1, least)
            tl.store(found_ids + to, tl.max(tl.where(likely & (x == least), token, -1), 0))


@triton.jit
def leave_out(
    edited,
    keys,
    positions,
    rows,
    extras,
    tops,
    sums,
    bounds,
    lasts,
    heats,
    found,
    found_ids,
    size,
    num_pieces,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """XTC: leave out all those but the last one, and weigh the piece anew."""
    await_others(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = tl.load(rows + row).to(tl.int64)
    probability = tl.load(extras + entry * _NUM_EXTRAS + _PROBABILITY)
    heat = tl.load(heats + entry)
    if (probability > 0) & (heat > 0):  # noqa: SIM102  Triton has no short cuts
        if _meets(keys, positions, row, entry, probability):
            at = row * num_pieces + tl.arange(0, PIECES)
            inside = tl.arange(0, PIECES) < num_pieces
            count = tl.sum(tl.load(found + at * 2, mask=inside, other=0.0), 0)
            leasts = tl.load(found + at * 2 + 1, mask=inside, other=float("inf"))
            least = tl.min(leasts, 0)
            ids = tl.load(found_ids + at, mask=inside, other=-1)
            stays = tl.max(tl.where(leasts == least, ids, -1), 0)
            if count > 1:
                token = piece * PIECE + tl.arange(0, PIECE)
                x = tl.load(edited + row * size + token, mask=token < size, other=LOWEST)
                bound, last = tl.load(bounds + row), tl.load(lasts + row)
                goes = (within(x, token, bound, last) >= least) & (token != stays)
                x = tl.where(goes, LOWEST, x)
                tl.store(edited + row * size + token, x, mask=goes & (token < size))
                top = tl.max(x, 0)
                base = tl.where(top == LOWEST, 0.0, top)
                tl.store(
                    sums + row * num_pieces + piece, tl.sum(tl.exp((within(x, token, bound, last) - base) / heat), 0)
                )
                tl.store(tops + row * num_pieces + piece, top)


@triton.jit
def measure_surprise(
    edited,
    temperature,
    rows,
    extras,
    tops,
    bounds,
    lasts,
    found,
    size,
    num_pieces,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Dynamic temperature: of what is left of a piece the weighed sum of distances to its top, and how many there
    are."""
    await_others(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = tl.load(rows + row).to(tl.int64)
    if (tl.load(extras + entry * _NUM_EXTRAS + _RANGE) > 0) & (tl.load(temperature + entry) > 0):
        at = tl.arange(0, PIECES)
        top = tl.max(tl.load(tops + row * num_pieces + at, mask=at < num_pieces, other=LOWEST), 0)
        to = row * num_pieces + piece
        mine = tl.load(tops + to)
        token = piece * PIECE + tl.arange(0, PIECE)
        x = tl.load(edited + row * size + token, mask=token < size, other=LOWEST)
        x = within(x, token, tl.load(bounds + row), tl.load(lasts + row))
        apart = tl.where(x > LOWEST, x - mine, 0.0)
        tl.store(found + to * 2, tl.sum(tl.where(x > LOWEST, tl.exp(apart) * apart, 0.0), 0))
        tl.store(found + to * 2 + 1, tl.sum((tl.exp(x - top) > 0).to(tl.float32), 0))


@triton.jit
def set_heat(
    edited,
    temperature,
    rows,
    extras,
    tops,
    sums,
    bounds,
    lasts,
    found,
    heats,
    tempered,
    size,
    num_pieces,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The sums of a piece's weights at the temperature to draw with, which is entered; others' are copied."""
    await_others(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = tl.load(rows + row).to(tl.int64)
    asked = extras + entry * _NUM_EXTRAS
    to = row * num_pieces + piece
    spread, heat = tl.load(asked + _RANGE), tl.load(temperature + entry)
    total = tl.load(sums + to)
    if (spread > 0) & (heat > 0):
        at = tl.arange(0, PIECES)
        inside = at < num_pieces
        known = tl.load(tops + row * num_pieces + at, mask=inside, other=LOWEST)
        top = tl.max(known, 0)
        some = inside & (known > LOWEST)
        scale = tl.where(some, tl.exp(known - top), 0.0)
        weights = tl.load(sums + row * num_pieces + at, mask=inside, other=0.0)
        apart = tl.load(found + (row * num_pieces + at) * 2, mask=inside, other=0.0)
        count = tl.sum(tl.load(found + (row * num_pieces + at) * 2 + 1, mask=inside, other=0.0), 0)
        whole = tl.sum(scale * weights, 0)
        mean = tl.sum(scale * (apart + tl.where(some, (known - top) * weights, 0.0)), 0) / whole
        if count > 1:
            share = tl.minimum(tl.maximum((tl.log(whole) - mean) / tl.log(count), 0.0), 1.0)
            power = tl.load(asked + _EXPONENT)
            share = tl.where(power == 0, 1.0, tl.where(share > 0, tl.exp(power * tl.log(share)), 0.0))
            low = tl.maximum(heat - spread, 0.0)
            heat = tl.maximum(low + (heat + spread - low) * share, _LEAST_HEAT)
        token = piece * PIECE + tl.arange(0, PIECE)
        x = tl.load(edited + row * size + token, mask=token < size, other=LOWEST)
        mine = tl.load(tops + to)
        base = tl.where(mine == LOWEST, 0.0, mine)
        x = within(x, token, tl.load(bounds + row), tl.load(lasts + row))
        total = tl.sum(tl.exp((x - base) / heat), 0)
        if piece == 0:
            tl.store(heats + entry, heat)
    tl.store(tempered + to, total)
