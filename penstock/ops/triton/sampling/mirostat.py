"""Set mirostat's cut of a row; update the samplers' state with its new token."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.ops.sampling.extras import (
    DRY_MULTIPLIER,
    MAX_MU,
    MIN_EXPONENT,
    MIROSTAT,
    MIROSTAT_ETA,
    MIROSTAT_TAU,
    MU,
    NUM_ESTIMATED,
    NUM_EXTRAS,
    NUM_PROMPT,
    WINDOW,
)
from penstock.ops.sampling.row_params import FREQUENCY, MIN_P, NUM_PARAMS, PRESENCE, REPETITION, TOP_K
from penstock.ops.triton.launch import wait_for_previous
from penstock.ops.triton.sampling.search import (
    LOWEST,
    NEAR_TOP,
    find_threshold,
    from_sortable,
    gather_candidates,
    to_sortable,
)

_MIROSTAT, _TAU, _ETA, _MU = (
    tl.constexpr(MIROSTAT),
    tl.constexpr(MIROSTAT_TAU),
    tl.constexpr(MIROSTAT_ETA),
    tl.constexpr(MU),
)
_DRY, _WINDOW, _NUM_PROMPT = tl.constexpr(DRY_MULTIPLIER), tl.constexpr(WINDOW), tl.constexpr(NUM_PROMPT)
_NUM_EXTRAS, _NUM_PARAMS, _MAX_MU = tl.constexpr(NUM_EXTRAS), tl.constexpr(NUM_PARAMS), tl.constexpr(MAX_MU)
_TOP_K, _MIN_P, _MIN_EXPONENT = tl.constexpr(TOP_K), tl.constexpr(MIN_P), tl.constexpr(MIN_EXPONENT)
_REPETITION, _FREQUENCY, _PRESENCE = tl.constexpr(REPETITION), tl.constexpr(FREQUENCY), tl.constexpr(PRESENCE)
_ESTIMATED = tl.constexpr(NUM_ESTIMATED)
_BITS = tl.constexpr(0.6931471805599453)  # nats of one


@triton.jit
def _zipf(ranked, count, temp, RANKED: tl.constexpr):
    """Estimate the Zipf exponent of ranked[count], logits in descending order."""
    at = tl.arange(0, RANKED)
    pair = at + 1 < count
    x = tl.load(ranked + at, mask=pair, other=0.0)
    y = tl.load(ranked + at + 1, mask=pair, other=0.0)
    step = tl.where(pair, tl.log((at + 2).to(tl.float32) / (at + 1).to(tl.float32)), 0.0)
    return tl.maximum(tl.sum(step * (x - y) / temp, 0) / tl.sum(step * step, 0), _MIN_EXPONENT)


@triton.jit
def _num_kept(
    values,
    tops,
    maxima,
    num_maxima,
    num_tiles,
    size,
    candidates,
    candidate_ids,
    top,
    temp,
    mu,
    MAX_CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKED: tl.constexpr,
):
    """Return how many tokens mirostat 1 keeps.

    The ranked logits are those over a bound, and some equal to it.
    """
    low, floor = tl.where(True, LOWEST, top), top - temp * NEAR_TOP
    if num_maxima >= _ESTIMATED:
        floor = find_threshold(maxima, num_maxima, _ESTIMATED * 1.0, low, top, 0.0, 0.0, True, PIVOTS, BLOCK)
    count = gather_candidates(
        values, tops, num_tiles, size, floor, candidates, candidate_ids, MAX_CANDIDATES, TILE, BLOCK
    )
    source, among = candidates, count
    if (count < _ESTIMATED) | (count > MAX_CANDIDATES):
        source, among = values, size
    bound = find_threshold(source, among, _ESTIMATED * 1.0, low, top, 0.0, 0.0, True, PIVOTS, BLOCK)
    over = from_sortable(to_sortable(bound) + 1)
    count = gather_candidates(
        values, tops, num_tiles, size, over, candidates, candidate_ids, MAX_CANDIDATES, TILE, BLOCK
    )
    kept = tl.where(bound == LOWEST, count, _ESTIMATED)
    some = tl.arange(0, RANKED)
    x = tl.load(candidates + some, mask=some < count, other=LOWEST)
    x = tl.where((some >= count) & (some < kept), bound, x)
    tl.debug_barrier()
    first = (x[None, :] > x[:, None]) | (x[None, :] == x[:, None]) & (some[None, :] < some[:, None])
    tl.store(candidates + tl.sum(first.to(tl.int32), 1), x)
    tl.debug_barrier()
    exponent = _zipf(candidates, kept, temp, RANKED)
    over_one = exponent - 1
    nats = tl.log(size.to(tl.float32))
    factor = tl.where(tl.abs(over_one) < 1e-3, 1 / nats, over_one / (1 - tl.exp(-over_one * nats)))
    wanted = tl.exp(tl.minimum(tl.maximum((tl.log(factor) + mu * _BITS) / exponent, -1.0), 50.0))
    wanted = tl.floor(tl.minimum(tl.maximum(wanted, 1.0), size.to(tl.float32)))
    return tl.where(kept < 2, 1.0, wanted)


@triton.jit
def set_mirostat_cut(
    edited,
    rows,
    extras,
    numbers,
    tops,
    sums,
    maxima,
    temps,
    candidates,
    candidate_ids,
    size,
    num_tiles,
    num_maxima,
    MAX_CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Set the row's top_k (mirostat 1) or min_p (mirostat 2) from its mu."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(rows + row).to(tl.int64)
    version = tl.load(extras + entry * _NUM_EXTRAS + _MIROSTAT)
    temp = tl.load(temps + entry)
    if (version > 0) & (temp > 0):
        mu = tl.load(extras + entry * _NUM_EXTRAS + _MU)
        at = tl.arange(0, TILES)
        inside = at < num_tiles
        tile_tops = tl.load(tops + row * num_tiles + at, mask=inside, other=LOWEST)
        top = tl.max(tile_tops, 0)
        broken = (tl.max((tile_tops != tile_tops).to(tl.int32), 0) > 0) | (top == LOWEST)
        if not broken:
            if version > 1:
                weight = tl.load(sums + row * num_tiles + at, mask=inside, other=0.0) * tl.exp((tile_tops - top) / temp)
                least = tl.sum(weight, 0) * tl.exp(tl.minimum(-mu * _BITS, 80.0))
                tl.store(numbers + entry * _NUM_PARAMS + _MIN_P, tl.minimum(least, 1.0))
            else:
                kept = _num_kept(
                    edited + row * size,
                    tops + row * num_tiles,
                    maxima + row * num_maxima,
                    num_maxima,
                    num_tiles,
                    size,
                    candidates + row * MAX_CANDIDATES,
                    candidate_ids + row * MAX_CANDIDATES,
                    top,
                    temp,
                    mu,
                    MAX_CANDIDATES,
                    TILE,
                    PIVOTS,
                    BLOCK,
                    RANKED,
                )
                tl.store(numbers + entry * _NUM_PARAMS + _TOP_K, kept)


@triton.jit
def _without_break(token):
    """Return the token of a history entry, which is -1 - token for a sequence breaker."""
    return tl.where(token < 0, -1 - token, token)


@triton.jit
def update_samplers(
    edited,
    rows,
    positions,
    extras,
    history,
    breakers,
    numbers,
    counts,
    tops,
    sums,
    temps,
    out,
    size,
    width,
    num_tiles,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add a row's new token to its history and counts, and update mirostat's mu."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(rows + row).to(tl.int64)
    params = extras + entry * _NUM_EXTRAS
    token, temp = tl.load(out + row), tl.load(temps + entry)
    if (tl.load(params + _MIROSTAT) > 0) & (token >= 0) & (temp > 0):
        at = tl.arange(0, TILES)
        inside = at < num_tiles
        tile_tops = tl.load(tops + row * num_tiles + at, mask=inside, other=LOWEST)
        top = tl.max(tile_tops, 0)
        weight = tl.load(sums + row * num_tiles + at, mask=inside, other=0.0) * tl.exp((tile_tops - top) / temp)
        surprise = (tl.log(tl.sum(weight, 0)) - (tl.load(edited + row * size + token) - top) / temp) / _BITS
        mu = tl.load(params + _MU) - tl.load(params + _ETA) * (surprise - tl.load(params + _TAU))
        tl.store(params + _MU, tl.minimum(tl.maximum(mu, -_MAX_MU), _MAX_MU))
    window = tl.load(params + _WINDOW).to(tl.int32)
    if ((tl.load(params + _DRY) > 0) | (window > 0)) & (token >= 0):
        length = tl.load(positions + row).to(tl.int32)
        text = history + entry * width
        word = tl.load(breakers + entry * ((size + 31) // 32) + token // 32)
        breaks = ((word >> (token % 32).to(tl.int32)) & 1) > 0
        tl.store(text + (length & (width - 1)), tl.where(breaks, -1 - token, token).to(tl.int32))
        param = numbers + entry * _NUM_PARAMS
        penal = (
            (tl.load(param + _REPETITION) != 1) | (tl.load(param + _FREQUENCY) != 0) | (tl.load(param + _PRESENCE) != 0)
        )
        first = length - window
        if (window > 0) & (first >= 0) & penal:
            tl.debug_barrier()
            gone = _without_break(tl.load(text + (first & (width - 1))))
            num_prompt = tl.load(params + _NUM_PROMPT).to(tl.int32)
            others = first * 0
            for start in range(first + 1, num_prompt, BLOCK):
                place = start + tl.arange(0, BLOCK)
                other = tl.load(text + (place & (width - 1)), mask=place < num_prompt, other=-1)
                others += tl.sum(((_without_break(other) == gone) & (place < num_prompt)).to(tl.int32), 0)
            count = tl.load(counts + entry * size + gone).to(tl.int32)
            less = tl.where(first >= num_prompt, count - 2, tl.where(others > 0, count, count & -2))
            tl.store(counts + entry * size + gone, less.to(tl.int16))
