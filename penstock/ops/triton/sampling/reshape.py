"""Change which tokens of a row may be drawn: top_n_sigma before the cut, XTC and dynamic temperature after it."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.ops.sampling.extras import (
    DRY_MULTIPLIER,
    DYNATEMP_EXPONENT,
    DYNATEMP_RANGE,
    MIN_TEMPERATURE,
    N_SIGMA,
    NUM_EXTRAS,
    XTC_PROBABILITY,
    XTC_THRESHOLD,
)
from penstock.ops.sampling.sample import GOLDEN
from penstock.ops.triton.launch import wait_for_previous
from penstock.ops.triton.numbers import mix_bits
from penstock.ops.triton.sampling.cut import apply_cut
from penstock.ops.triton.sampling.search import LOWEST, NO_TOKEN

_DRY, _N_SIGMA, _NUM_EXTRAS = tl.constexpr(DRY_MULTIPLIER), tl.constexpr(N_SIGMA), tl.constexpr(NUM_EXTRAS)
_RANGE, _EXPONENT, _MIN_TEMPERATURE = (
    tl.constexpr(DYNATEMP_RANGE),
    tl.constexpr(DYNATEMP_EXPONENT),
    tl.constexpr(MIN_TEMPERATURE),
)
_PROBABILITY, _THRESHOLD = tl.constexpr(XTC_PROBABILITY), tl.constexpr(XTC_THRESHOLD)
_GOLDEN = tl.constexpr(GOLDEN)


@triton.jit
def measure_moments(edited, rows, extras, moments, size, num_tiles, TILE: tl.constexpr, PDL: tl.constexpr):
    """Reduce a tile to the count of finite logits, their mean, the sum of squares about it, and the maximum."""
    wait_for_previous(PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    params = extras + tl.load(rows + row).to(tl.int64) * _NUM_EXTRAS
    if (tl.load(params + _DRY) > 0) | (tl.load(params + _N_SIGMA) > 0):
        token = tile * TILE + tl.arange(0, TILE)
        x = tl.load(edited + row * size + token, mask=token < size, other=LOWEST)
        possible = x > LOWEST
        count = tl.sum(possible.to(tl.float32), 0)
        mean = tl.sum(tl.where(possible, x, 0.0), 0) / tl.maximum(count, 1.0)
        apart = tl.where(possible, x - mean, 0.0)
        at = moments + (row * num_tiles + tile) * 4
        tl.store(at, count)
        tl.store(at + 1, mean)
        tl.store(at + 2, tl.sum(apart * apart, 0))
        tl.store(at + 3, tl.max(x, 0))


@triton.jit
def apply_top_n_sigma(
    edited,
    temperature,
    rows,
    extras,
    moments,
    tops,
    sums,
    places,
    maxima,
    temps,
    size,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Mask logits more than n standard deviations under the row's largest, and reduce the tile again.

    It stores every row's temperature for the cut: 1 where dynamic temperature sets it later.
    """
    wait_for_previous(PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = tl.load(rows + row).to(tl.int64)
    params = extras + entry * _NUM_EXTRAS
    temp = tl.load(temperature + entry)
    is_dynamic = (tl.load(params + _RANGE) > 0) & (temp > 0)
    temp = tl.where(is_dynamic, 1.0, temp)
    if tile == 0:
        tl.store(temps + entry, temp)
    n = tl.load(params + _N_SIGMA)
    changed = (tl.load(params + _DRY) > 0) | (n > 0)
    if changed | is_dynamic:
        at = tl.arange(0, TILES)
        inside = at < num_tiles
        tile_tops = tl.load(tops + row * num_tiles + at, mask=inside, other=LOWEST)
        broken = tl.max((tile_tops != tile_tops).to(tl.int32), 0) > 0
        if not broken:
            token = tile * TILE + tl.arange(0, TILE)
            x = tl.load(edited + row * size + token, mask=token < size, other=LOWEST)
            if n > 0:
                tile_moments = moments + (row * num_tiles + at) * 4
                counts = tl.load(tile_moments, mask=inside, other=0.0)
                means = tl.load(tile_moments + 1, mask=inside, other=0.0)
                squares = tl.load(tile_moments + 2, mask=inside, other=0.0)
                top = tl.max(tl.load(tile_moments + 3, mask=inside, other=LOWEST), 0)
                count = tl.maximum(tl.sum(counts, 0), 1.0)
                mean = tl.sum(counts * means, 0) / count
                apart = means - mean
                deviation = tl.sqrt(tl.sum(squares + counts * apart * apart, 0) / count)
                x = tl.where(x < top - n * deviation, LOWEST, x)
                tl.store(edited + row * size + token, x, mask=token < size)
            _reduce_tile(x, token, row * num_tiles + tile, temp, tops, sums, places, maxima, TILE, PARTS)


@triton.jit
def _reduce_tile(x, token, at, temp, tops, sums, places, maxima, TILE: tl.constexpr, PARTS: tl.constexpr):
    """Store a tile's largest logit, its token, the sum of weights and the parts' maxima; NO_TOKEN stays."""
    top = tl.max(x, 0)
    base = tl.where(top == LOWEST, 0.0, top)
    was = tl.load(places + at)
    place = tl.min(tl.where(x == top, token, NO_TOKEN), 0)
    tl.store(sums + at, tl.sum(tl.exp((x - base) / tl.where(temp > 0, temp, 1.0)), 0))
    tl.store(places + at, tl.where(was == NO_TOKEN, NO_TOKEN, place))
    part = tl.arange(0, PARTS)
    tl.store(maxima + at * PARTS + part, tl.max(tl.reshape(x, (PARTS, TILE // PARTS)), 1))
    tl.store(tops + at, top)


@triton.jit
def _has_xtc_chance(keys, positions, row, entry, probability):
    """Return True if the row's third random number is below XTC's probability."""
    key, position = tl.load(keys + entry), tl.load(positions + row).to(tl.uint32)
    third = mix_bits(
        mix_bits((key >> 32).to(tl.uint32) ^ mix_bits(position + _GOLDEN + _GOLDEN)) ^ mix_bits(key.to(tl.uint32))
    )
    return (third >> 8).to(tl.float32) * 5.9604644775390625e-08 < probability


@triton.jit
def find_xtc_tokens(
    edited,
    keys,
    positions,
    rows,
    extras,
    tops,
    sums,
    bounds,
    lasts,
    temps,
    found,
    found_ids,
    size,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reduce a tile to the tokens that reach XTC's threshold after the cut: their number, the smallest logit, and the
    last token with it."""
    wait_for_previous(PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = tl.load(rows + row).to(tl.int64)
    probability = tl.load(extras + entry * _NUM_EXTRAS + _PROBABILITY)
    temp = tl.load(temps + entry)
    if (probability > 0) & (temp > 0):  # noqa: SIM102  Triton has no short cuts
        if _has_xtc_chance(keys, positions, row, entry, probability):
            at = tl.arange(0, TILES)
            inside = at < num_tiles
            tile_tops = tl.load(tops + row * num_tiles + at, mask=inside, other=LOWEST)
            top = tl.max(tile_tops, 0)
            weight = tl.load(sums + row * num_tiles + at, mask=inside, other=0.0) * tl.exp((tile_tops - top) / temp)
            needed = tl.load(extras + entry * _NUM_EXTRAS + _THRESHOLD) * tl.sum(weight, 0)
            token = tile * TILE + tl.arange(0, TILE)
            x = tl.load(edited + row * size + token, mask=token < size, other=LOWEST)
            x = apply_cut(x, token, tl.load(bounds + row), tl.load(lasts + row))
            w = tl.exp((x - top) / temp)
            likely = (w >= needed) & (w > 0)
            least = tl.min(tl.where(likely, x, float("inf")), 0)
            to = row * num_tiles + tile
            tl.store(found + to * 2, tl.sum(likely.to(tl.float32), 0))
            tl.store(found + to * 2 + 1, least)
            tl.store(found_ids + to, tl.max(tl.where(likely & (x == least), token, -1), 0))


@triton.jit
def apply_xtc(
    edited,
    keys,
    positions,
    rows,
    extras,
    tops,
    sums,
    bounds,
    lasts,
    temps,
    found,
    found_ids,
    size,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Mask all tokens that reach XTC's threshold but the least likely, and sum the tile's weights again."""
    wait_for_previous(PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = tl.load(rows + row).to(tl.int64)
    probability = tl.load(extras + entry * _NUM_EXTRAS + _PROBABILITY)
    temp = tl.load(temps + entry)
    if (probability > 0) & (temp > 0):  # noqa: SIM102  Triton has no short cuts
        if _has_xtc_chance(keys, positions, row, entry, probability):
            at = row * num_tiles + tl.arange(0, TILES)
            inside = tl.arange(0, TILES) < num_tiles
            count = tl.sum(tl.load(found + at * 2, mask=inside, other=0.0), 0)
            leasts = tl.load(found + at * 2 + 1, mask=inside, other=float("inf"))
            least = tl.min(leasts, 0)
            ids = tl.load(found_ids + at, mask=inside, other=-1)
            stays = tl.max(tl.where(leasts == least, ids, -1), 0)
            if count > 1:
                token = tile * TILE + tl.arange(0, TILE)
                x = tl.load(edited + row * size + token, mask=token < size, other=LOWEST)
                bound, last = tl.load(bounds + row), tl.load(lasts + row)
                goes = (apply_cut(x, token, bound, last) >= least) & (token != stays)
                x = tl.where(goes, LOWEST, x)
                tl.store(edited + row * size + token, x, mask=goes & (token < size))
                top = tl.max(x, 0)
                base = tl.where(top == LOWEST, 0.0, top)
                tl.store(
                    sums + row * num_tiles + tile, tl.sum(tl.exp((apply_cut(x, token, bound, last) - base) / temp), 0)
                )
                tl.store(tops + row * num_tiles + tile, top)


@triton.jit
def measure_entropy(
    edited,
    temperature,
    rows,
    extras,
    tops,
    bounds,
    lasts,
    found,
    size,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reduce what is left of a tile to the weighted sum of distances to its top, and a count."""
    wait_for_previous(PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = tl.load(rows + row).to(tl.int64)
    if (tl.load(extras + entry * _NUM_EXTRAS + _RANGE) > 0) & (tl.load(temperature + entry) > 0):
        at = tl.arange(0, TILES)
        top = tl.max(tl.load(tops + row * num_tiles + at, mask=at < num_tiles, other=LOWEST), 0)
        to = row * num_tiles + tile
        mine = tl.load(tops + to)
        token = tile * TILE + tl.arange(0, TILE)
        x = tl.load(edited + row * size + token, mask=token < size, other=LOWEST)
        x = apply_cut(x, token, tl.load(bounds + row), tl.load(lasts + row))
        apart = tl.where(x > LOWEST, x - mine, 0.0)
        tl.store(found + to * 2, tl.sum(tl.where(x > LOWEST, tl.exp(apart) * apart, 0.0), 0))
        tl.store(found + to * 2 + 1, tl.sum((tl.exp(x - top) > 0).to(tl.float32), 0))


@triton.jit
def set_dynamic_temperature(
    edited,
    temperature,
    rows,
    extras,
    tops,
    sums,
    bounds,
    lasts,
    found,
    temps,
    tempered,
    size,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the row's temperature and sum the tile's weights at it; copy the sums of other rows."""
    wait_for_previous(PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = tl.load(rows + row).to(tl.int64)
    params = extras + entry * _NUM_EXTRAS
    to = row * num_tiles + tile
    spread, temp = tl.load(params + _RANGE), tl.load(temperature + entry)
    total = tl.load(sums + to)
    if (spread > 0) & (temp > 0):
        at = tl.arange(0, TILES)
        inside = at < num_tiles
        tile_tops = tl.load(tops + row * num_tiles + at, mask=inside, other=LOWEST)
        top = tl.max(tile_tops, 0)
        some = inside & (tile_tops > LOWEST)
        scale = tl.where(some, tl.exp(tile_tops - top), 0.0)
        weights = tl.load(sums + row * num_tiles + at, mask=inside, other=0.0)
        apart = tl.load(found + (row * num_tiles + at) * 2, mask=inside, other=0.0)
        count = tl.sum(tl.load(found + (row * num_tiles + at) * 2 + 1, mask=inside, other=0.0), 0)
        whole = tl.sum(scale * weights, 0)
        mean = tl.sum(scale * (apart + tl.where(some, (tile_tops - top) * weights, 0.0)), 0) / whole
        if count > 1:
            share = tl.minimum(tl.maximum((tl.log(whole) - mean) / tl.log(count), 0.0), 1.0)
            power = tl.load(params + _EXPONENT)
            share = tl.where(power == 0, 1.0, tl.where(share > 0, tl.exp(power * tl.log(share)), 0.0))
            low = tl.maximum(temp - spread, 0.0)
            temp = tl.maximum(low + (temp + spread - low) * share, _MIN_TEMPERATURE)
        token = tile * TILE + tl.arange(0, TILE)
        x = tl.load(edited + row * size + token, mask=token < size, other=LOWEST)
        mine = tl.load(tops + to)
        base = tl.where(mine == LOWEST, 0.0, mine)
        x = apply_cut(x, token, tl.load(bounds + row), tl.load(lasts + row))
        total = tl.sum(tl.exp((x - base) / temp), 0)
        if tile == 0:
            tl.store(temps + entry, temp)
    tl.store(tempered + to, total)
