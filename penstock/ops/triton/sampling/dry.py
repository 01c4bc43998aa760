"""Apply DRY: lower the tokens that would continue a repetition."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.ops.sampling.extras import DRY_ALLOWED, DRY_BASE, DRY_LAST_N, DRY_MAX_MATCH, DRY_MULTIPLIER, NUM_EXTRAS
from penstock.ops.triton.launch import wait_for_previous
from penstock.ops.triton.sampling.edit import clamp_finite, edit_logits
from penstock.ops.triton.sampling.search import LOWEST

_MULTIPLIER, _BASE, _ALLOWED = tl.constexpr(DRY_MULTIPLIER), tl.constexpr(DRY_BASE), tl.constexpr(DRY_ALLOWED)
_LAST_N, _MAX_MATCH, _NUM_EXTRAS = tl.constexpr(DRY_LAST_N), tl.constexpr(DRY_MAX_MATCH), tl.constexpr(NUM_EXTRAS)
_NONE, _NEVER = tl.constexpr(-2147483648), tl.constexpr(-2147483647)  # neither tokens nor breakers


@triton.jit
def count_matches(text, width, place, begin, length, max_match):
    """Count the tokens before each place that equal those at the text's end, down to `begin` or a sequence breaker."""
    alive = place < length
    run = place * 0
    back = 1
    going = tl.max(alive.to(tl.int32), 0) > 0
    while going:
        end = tl.load(text + ((length - back) & (width - 1)))
        before = tl.load(text + ((place - back) & (width - 1)), mask=alive & (place - back >= begin), other=_NONE)
        alive = before == tl.where(end >= 0, end, _NEVER)
        run += alive.to(tl.int32)
        going = (tl.max(alive.to(tl.int32), 0) > 0) & (back < max_match)
        back += 1
    return run


@triton.jit
def _atomic_min(to, x, mask):
    """Store the smaller of x and what is there, atomically.

    Positive floats have the order of their bits, negative ones the opposite.
    """
    x = tl.where(x == 0, 0.0, x)
    tl.atomic_min(to.to(tl.pointer_type(tl.int32), bitcast=True), x.to(tl.int32, bitcast=True), mask=mask & (x >= 0))
    tl.atomic_max(to.to(tl.pointer_type(tl.uint32), bitcast=True), x.to(tl.uint32, bitcast=True), mask=mask & (x < 0))


@triton.jit
def apply_dry(
    logits,
    edited,
    rows,
    positions,
    numbers,
    counts,
    words,
    biased,
    bias,
    extras,
    history,
    row_stride,
    size,
    width,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Lower the tokens at BLOCK positions of a row's text by the penalty of the repetitions before them.

    A token at several positions takes the largest penalty.
    """
    wait_for_previous(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = tl.load(rows + row).to(tl.int64)
    params = extras + entry * _NUM_EXTRAS
    multiplier = tl.load(params + _MULTIPLIER)
    if multiplier > 0:
        length = tl.load(positions + row).to(tl.int32)
        window = tl.minimum(tl.minimum(length, width), tl.load(params + _LAST_N).to(tl.int32))
        allowed = tl.load(params + _ALLOWED).to(tl.int32)
        first = length - window + 1 + part * BLOCK
        if (window > allowed) & (first < length):
            text = history + entry * width
            place = first + tl.arange(0, BLOCK)
            token = tl.load(text + (place & (width - 1)), mask=place < length, other=-1)
            run = count_matches(text, width, place, length - window, length, tl.load(params + _MAX_MATCH).to(tl.int32))
            hit = (token >= 0) & (token < size) & (run >= allowed)
            if tl.max(hit.to(tl.int32), 0) > 0:
                token = tl.where(hit, token, 0)
                x = tl.load(logits + row * row_stride + token, mask=hit, other=LOWEST).to(tl.float32)
                x = edit_logits(x, token, size, entry, numbers, counts, words, biased, bias)
                power = tl.exp(tl.log(tl.load(params + _BASE)) * (run - allowed).to(tl.float32))
                less = clamp_finite(x - multiplier * power)
                _atomic_min(edited + row * size + token, less, hit & (x > LOWEST))
