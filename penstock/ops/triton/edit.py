"""A row's own changes of its logits."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.ops.triton.search import LOWEST
from penstock.ops.wishes import FREQUENCY, MASKED, MOST_BIASED, NUM_BIASED, NUM_WISHES, PRESENCE, REPETITION

_REPETITION, _FREQUENCY, _PRESENCE = tl.constexpr(REPETITION), tl.constexpr(FREQUENCY), tl.constexpr(PRESENCE)
_NUM_BIASED, _MASKED = tl.constexpr(NUM_BIASED), tl.constexpr(MASKED)
_MOST_BIASED, _NUM_WISHES = tl.constexpr(MOST_BIASED), tl.constexpr(NUM_WISHES)


@triton.jit
def fitting(x):
    return tl.minimum(tl.maximum(x, -3.4028234663852886e38), 3.4028234663852886e38)


@triton.jit
def edit(x, token, size, entry, numbers, counts, words, biased, bias):
    """Logits of some tokens with the entry's biases, penalties and mask."""
    wish = numbers + entry * _NUM_WISHES
    inside = token < size
    num_biased = tl.load(wish + _NUM_BIASED).to(tl.int32)
    for i in range(0, num_biased):
        added = tl.load(bias + entry * _MOST_BIASED + i)
        x = tl.where(token == tl.load(biased + entry * _MOST_BIASED + i), x + added, x)
    repetition = tl.load(wish + _REPETITION)
    frequency, presence = tl.load(wish + _FREQUENCY), tl.load(wish + _PRESENCE)
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        count = tl.load(counts + entry * size + token, mask=inside, other=0).to(tl.int32)
        possible = (x > LOWEST) & (x == x)
        if repetition != 1:
            x = tl.where((count > 0) & possible, fitting(tl.where(x > 0, x / repetition, x * repetition)), x)
        times = (count >> 1).to(tl.float32)
        x = tl.where((times > 0) & possible, fitting(x - (frequency * times + presence)), x)
    if tl.load(wish + _MASKED) > 0:
        num_words = (size + 31) // 32
        word = tl.load(words + entry * num_words + token // 32, mask=inside, other=0)
        x = tl.where(((word >> (token % 32)) & 1) > 0, x, LOWEST)
    return x
