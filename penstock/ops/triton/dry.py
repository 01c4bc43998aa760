"""DRY: which tokens would go on with a repetition, and what they lose."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.ops.extras import DRY_ALLOWED, DRY_BASE, DRY_LAST_N, DRY_MOST, DRY_MULTIPLIER, NUM_EXTRAS
from penstock.ops.triton.edit import edit, fitting
from penstock.ops.triton.launch import await_others
from penstock.ops.triton.search import LOWEST

_MULTIPLIER, _BASE, _ALLOWED = tl.constexpr(DRY_MULTIPLIER), tl.constexpr(DRY_BASE), tl.constexpr(DRY_ALLOWED)
_LAST_N, _MOST, _NUM_EXTRAS = tl.constexpr(DRY_LAST_N), tl.constexpr(DRY_MOST), tl.constexpr(NUM_EXTRAS)
_NONE, _NEVER = tl.constexpr(-2147483648), tl.constexpr(-2147483647)  # neither tokens nor breakers


@triton.jit
def count_repeated(text, width, place, begin, length, most):
    """How many tokens before each place are those at the text's end; none reaches back to `begin` or past a breaker."""
    alive = place < length
    run = place * 0
    back = 1
    going = tl.max(alive.to(tl.int32), 0) > 0
    while going:
        end = tl.load(text + ((length - back) & (width - 1)))
        before = tl.load(text + ((place - back) & (width - 1)), mask=alive & (place - back >= begin), other=_NONE)
        alive = before == tl.where(end >= 0, end, _NEVER)
        run += alive.to(tl.int32)
        going = (tl.max(alive.to(tl.int32), 0) > 0) & (back < most)
        back += 1
    return run


@triton.jit
def _lower(to, x, mask):
    """Store x where it is less, whoever else does the same. Floats are in the order of their bits where they are
    positive, and in the opposite one where they are not."""
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
    EARLY: tl.constexpr,
):
    """For some places of a row's text: the tokens there lose what the repetitions before them ask. A token at several
    places loses the most of it, since each asks for the smallest result."""
    await_others(EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = tl.load(rows + row).to(tl.int64)
    asked = extras + entry * _NUM_EXTRAS
    multiplier = tl.load(asked + _MULTIPLIER)
    if multiplier > 0:
        length = tl.load(positions + row).to(tl.int32)
        window = tl.minimum(tl.minimum(length, width), tl.load(asked + _LAST_N).to(tl.int32))
        allowed = tl.load(asked + _ALLOWED).to(tl.int32)
        first = length - window + 1 + part * BLOCK
        if (window > allowed) & (first < length):
            text = history + entry * width
            place = first + tl.arange(0, BLOCK)
            token = tl.load(text + (place & (width - 1)), mask=place < length, other=-1)
            run = count_repeated(text, width, place, length - window, length, tl.load(asked + _MOST).to(tl.int32))
            hit = (token >= 0) & (token < size) & (run >= allowed)
            if tl.max(hit.to(tl.int32), 0) > 0:
                token = tl.where(hit, token, 0)
                x = tl.load(logits + row * row_stride + token, mask=hit, other=LOWEST).to(tl.float32)
                x = edit(x, token, size, entry, numbers, counts, words, biased, bias)
                power = tl.exp(tl.log(tl.load(asked + _BASE)) * (run - allowed).to(tl.float32))
                less = fitting(x - multiplier * power)
                _lower(edited + row * size + token, less, hit & (x > LOWEST))
