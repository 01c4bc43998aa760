"""Mirostat's cut of a row, and what its samplers keep of the token that was drawn."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.ops.extras import (
    DRY_MULTIPLIER,
    LEAST_EXPONENT,
    MIROSTAT,
    MIROSTAT_ETA,
    MIROSTAT_TAU,
    MOST_MU,
    MU,
    NUM_ESTIMATED,
    NUM_EXTRAS,
    NUM_PROMPT,
    WINDOW,
)
from penstock.ops.triton.launch import await_others
from penstock.ops.triton.search import LOWEST, gathered, ordered, reaching, unordered
from penstock.ops.wishes import FREQUENCY, MIN_P, NUM_WISHES, PRESENCE, REPETITION, TOP_K

_MIROSTAT, _TAU, _ETA, _MU = (
    tl.constexpr(MIROSTAT),
    tl.constexpr(MIROSTAT_TAU),
    tl.constexpr(MIROSTAT_ETA),
    tl.constexpr(MU),
)
_DRY, _WINDOW, _NUM_PROMPT = tl.constexpr(DRY_MULTIPLIER), tl.constexpr(WINDOW), tl.constexpr(NUM_PROMPT)
_NUM_EXTRAS, _NUM_WISHES, _MOST_MU = tl.constexpr(NUM_EXTRAS), tl.constexpr(NUM_WISHES), tl.constexpr(MOST_MU)
_TOP_K, _MIN_P, _LEAST = tl.constexpr(TOP_K), tl.constexpr(MIN_P), tl.constexpr(LEAST_EXPONENT)
_REPETITION, _FREQUENCY, _PRESENCE = tl.constexpr(REPETITION), tl.constexpr(FREQUENCY), tl.constexpr(PRESENCE)
_ESTIMATED = tl.constexpr(NUM_ESTIMATED)
_NEAR = tl.constexpr(8.4)
_BITS = tl.constexpr(0.6931471805599453)  # nats of one


@triton.jit
def _zipf(ranked, count, heat, MOST: tl.constexpr):
    """The exponent by which the probabilities of ranked[count] fall."""
    at = tl.arange(0, MOST)
    pair = at + 1 < count
    x = tl.load(ranked + at, mask=pair, other=0.0)
    y = tl.load(ranked + at + 1, mask=pair, other=0.0)
    step = tl.where(pair, tl.log((at + 2).to(tl.float32) / (at + 1).to(tl.float32)), 0.0)
    return tl.maximum(tl.sum(step * (x - y) / heat, 0) / tl.sum(step * step, 0), _LEAST)


@triton.jit
def _num_kept(
    values,
    tops,
    heads,
    num_heads,
    num_pieces,
    size,
    near,
    near_ids,
    top,
    heat,
    mu,
    ROOM: tl.constexpr,
    PIECE: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    """Version 1: how many tokens to keep. The largest logits are those over a bound, and some equal to it."""
    low, floor = tl.where(True, LOWEST, top), top - heat * _NEAR
    if num_heads >= _ESTIMATED:
        floor = reaching(heads, num_heads, _ESTIMATED * 1.0, low, top, 0.0, 0.0, True, PIVOTS, BLOCK)
    count = gathered(values, tops, num_pieces, size, floor, near, near_ids, ROOM, PIECE, BLOCK)
    source, among = near, count
    if (count < _ESTIMATED) | (count > ROOM):
        source, among = values, size
    bound = reaching(source, among, _ESTIMATED * 1.0, low, top, 0.0, 0.0, True, PIVOTS, BLOCK)
    over = unordered(ordered(bound) + 1)
    count = gathered(values, tops, num_pieces, size, over, near, near_ids, ROOM, PIECE, BLOCK)
    kept = tl.where(bound == LOWEST, count, _ESTIMATED)
    some = tl.arange(0, MOST)
    x = tl.load(near + some, mask=some < count, other=LOWEST)
    x = tl.where((some >= count) & (some < kept), bound, x)
    tl.debug_barrier()
    first = (x[None, :] > x[:, None]) | (x[None, :] == x[:, None]) & (some[None, :] < some[:, None])
    tl.store(near + tl.sum(first.to(tl.int32), 1), x)
    tl.debug_barrier()
    exponent = _zipf(near, kept, heat, MOST)
    over_one = exponent - 1
    nats = tl.log(size.to(tl.float32))
    factor = tl.where(tl.abs(over_one) < 1e-3, 1 / nats, over_one / (1 - tl.exp(-over_one * nats)))
    wanted = tl.exp(tl.minimum(tl.maximum((tl.log(factor) + mu * _BITS) / exponent, -1.0), 50.0))
    wanted = tl.floor(tl.minimum(tl.maximum(wanted, 1.0), size.to(tl.float32)))
    return tl.where(kept < 2, 1.0, wanted)


@triton.jit
def aim(
    edited,
    rows,
    extras,
    numbers,
    tops,
    sums,
    heads,
    heats,
    near,
    near_ids,
    size,
    num_pieces,
    num_heads,
    ROOM: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Enter the top_k or the min_p that mirostat makes of a row's mu."""
    await_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(rows + row).to(tl.int64)
    version = tl.load(extras + entry * _NUM_EXTRAS + _MIROSTAT)
    heat = tl.load(heats + entry)
    if (version > 0) & (heat > 0):
        mu = tl.load(extras + entry * _NUM_EXTRAS + _MU)
        at = tl.arange(0, PIECES)
        inside = at < num_pieces
        known = tl.load(tops + row * num_pieces + at, mask=inside, other=LOWEST)
        top = tl.max(known, 0)
        broken = (tl.max((known != known).to(tl.int32), 0) > 0) | (top == LOWEST)
        if not broken:
            if version > 1:
                weight = tl.load(sums + row * num_pieces + at, mask=inside, other=0.0) * tl.exp((known - top) / heat)
                least = tl.sum(weight, 0) * tl.exp(tl.minimum(-mu * _BITS, 80.0))
                tl.store(numbers + entry * _NUM_WISHES + _MIN_P, tl.minimum(least, 1.0))
            else:
                kept = _num_kept(
                    edited + row * size,
                    tops + row * num_pieces,
                    heads + row * num_heads,
                    num_heads,
                    num_pieces,
                    size,
                    near + row * ROOM,
                    near_ids + row * ROOM,
                    top,
                    heat,
                    mu,
                    ROOM,
                    PIECE,
                    PIVOTS,
                    BLOCK,
                    MOST,
                )
                tl.store(numbers + entry * _NUM_WISHES + _TOP_K, kept)


@triton.jit
def _plain(token):
    return tl.where(token < 0, -1 - token, token)


@triton.jit
def settle(
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
    heats,
    out,
    size,
    width,
    num_pieces,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Enter a row's new token where its samplers look for it, and mirostat's mu after it."""
    await_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(rows + row).to(tl.int64)
    asked = extras + entry * _NUM_EXTRAS
    token, heat = tl.load(out + row), tl.load(heats + entry)
    if (tl.load(asked + _MIROSTAT) > 0) & (token >= 0) & (heat > 0):
        at = tl.arange(0, PIECES)
        inside = at < num_pieces
        known = tl.load(tops + row * num_pieces + at, mask=inside, other=LOWEST)
        top = tl.max(known, 0)
        weight = tl.load(sums + row * num_pieces + at, mask=inside, other=0.0) * tl.exp((known - top) / heat)
        surprise = (tl.log(tl.sum(weight, 0)) - (tl.load(edited + row * size + token) - top) / heat) / _BITS
        mu = tl.load(asked + _MU) - tl.load(asked + _ETA) * (surprise - tl.load(asked + _TAU))
        tl.store(asked + _MU, tl.minimum(tl.maximum(mu, -_MOST_MU), _MOST_MU))
    window = tl.load(asked + _WINDOW).to(tl.int32)
    if ((tl.load(asked + _DRY) > 0) | (window > 0)) & (token >= 0):
        length = tl.load(positions + row).to(tl.int32)
        text = history + entry * width
        word = tl.load(breakers + entry * ((size + 31) // 32) + token // 32)
        breaks = ((word >> (token % 32).to(tl.int32)) & 1) > 0
        tl.store(text + (length & (width - 1)), tl.where(breaks, -1 - token, token).to(tl.int32))
        wish = numbers + entry * _NUM_WISHES
        penal = (
            (tl.load(wish + _REPETITION) != 1) | (tl.load(wish + _FREQUENCY) != 0) | (tl.load(wish + _PRESENCE) != 0)
        )
        first = length - window
        if (window > 0) & (first >= 0) & penal:
            tl.debug_barrier()
            gone = _plain(tl.load(text + (first & (width - 1))))
            num_prompt = tl.load(asked + _NUM_PROMPT).to(tl.int32)
            others = first * 0
            for start in range(first + 1, num_prompt, BLOCK):
                place = start + tl.arange(0, BLOCK)
                other = tl.load(text + (place & (width - 1)), mask=place < num_prompt, other=-1)
                others += tl.sum(((_plain(other) == gone) & (place < num_prompt)).to(tl.int32), 0)
            count = tl.load(counts + entry * size + gone).to(tl.int32)
            less = tl.where(first >= num_prompt, count - 2, tl.where(others > 0, count, count & -2))
            tl.store(counts + entry * size + gone, less.to(tl.int16))
