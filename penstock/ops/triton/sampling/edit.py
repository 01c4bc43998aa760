"""Apply a row's biases, penalties and logits mask."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.ops.sampling.row_params import FREQUENCY, MASKED, MAX_BIASED, NUM_BIASED, NUM_PARAMS, PRESENCE, REPETITION
from penstock.ops.triton.sampling.search import LOWEST

_REPETITION, _FREQUENCY, _PRESENCE = tl.constexpr(REPETITION), tl.constexpr(FREQUENCY), tl.constexpr(PRESENCE)
_NUM_BIASED, _MASKED = tl.constexpr(NUM_BIASED), tl.constexpr(MASKED)
_MAX_BIASED, _NUM_PARAMS = tl.constexpr(MAX_BIASED), tl.constexpr(NUM_PARAMS)


@triton.jit
def clamp_finite(x):
    """Clamp x to the finite range of float32."""
    return tl.minimum(tl.maximum(x, -3.4028234663852886e38), 3.4028234663852886e38)


@triton.jit
def edit_logits(x, token, size, entry, numbers, counts, words, biased, bias):
    """Apply the entry's biases, penalties and mask to the logits x of some tokens."""
    param = numbers + entry * _NUM_PARAMS
    inside = token < size
    num_biased = tl.load(param + _NUM_BIASED).to(tl.int32)
    for i in range(0, num_biased):
        added = tl.load(bias + entry * _MAX_BIASED + i)
        x = tl.where(token == tl.load(biased + entry * _MAX_BIASED + i), x + added, x)
    repetition = tl.load(param + _REPETITION)
    frequency, presence = tl.load(param + _FREQUENCY), tl.load(param + _PRESENCE)
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        count = tl.load(counts + entry * size + token, mask=inside, other=0).to(tl.int32)
        possible = (x > LOWEST) & (x == x)
        if repetition != 1:
            x = tl.where((count > 0) & possible, clamp_finite(tl.where(x > 0, x / repetition, x * repetition)), x)
        times = (count >> 1).to(tl.float32)
        x = tl.where((times > 0) & possible, clamp_finite(x - (frequency * times + presence)), x)
    if tl.load(param + _MASKED) > 0:
        num_words = (size + 31) // 32
        word = tl.load(words + entry * num_words + token // 32, mask=inside, other=0)
        x = tl.where(((word >> (token % 32)) & 1) > 0, x, LOWEST)
    return x
