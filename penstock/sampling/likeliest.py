"""Which tokens come first: the higher value, on equal values the lower id. Values are one float32 row [V]."""

from __future__ import annotations

import math

import numpy as np
import torch

from penstock.ops import above
from penstock.sampling.arrays import Array, UnusableLogits

FOLD = 64
ROOM = 2048  # places listed at a time: more are found by other means


DAMAGED = "the model's logits contain NaN or infinity: its weights or its arithmetic are damaged"


def likeliest(values: Array) -> int:
    """The first token; also the check that every value is a number and at least one is possible."""
    token = int(values.argmax())  # a NaN counts as the largest; of equals the lowest id is returned
    top = float(values[token])
    if math.isfinite(top):
        return token
    if math.isnan(top):
        raise UnusableLogits("the model's logits contain NaN: its weights or its arithmetic are damaged")
    if top > 0:
        raise UnusableLogits("the model's logits contain +inf: its weights or its arithmetic are damaged")
    raise UnusableLogits(f"all {len(values)} logits are -inf: no token is left to choose")


def first(values: Array, least: float, count: int) -> Array:
    """The `count` first tokens, ids ascending, where `least` is the value of the last of them."""
    kept = values > least
    equal = np.flatnonzero(values == least)
    kept[equal[: count - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def at_least(values: Array, least: float) -> Array:
    """Tokens of this value or more, ids ascending."""
    found: Array = above(torch.from_numpy(values)[None], torch.tensor([least], dtype=torch.float32), ROOM)[0].numpy()
    count = int(found[0])
    return found[1 : 1 + count].astype(np.int64) if count <= ROOM else np.flatnonzero(values >= np.float32(least))


def largest(values: Array, count: int) -> Array:
    """The `count` first tokens, ids ascending."""
    if not 0 < count < len(values):
        return np.arange(min(count, len(values)))
    few = _few(values, count)
    if few is None:
        return first(values, _nth_largest(values, count), count)
    kept = values[few]
    return np.asarray(few[first(kept, _nth_largest(kept, count), count)])


def ranked(values: Array, count: int) -> Array:
    """The `count` first tokens, likeliest first."""
    ids = largest(values, count)
    return ids[np.argsort(-values[ids], kind="stable")]


def rank(values: Array, token: int) -> int:
    """Place of one token in the order, from 1."""
    value = values[token]
    return 1 + int(np.count_nonzero(values > value)) + int(np.count_nonzero(values[:token] == value))


def _few(values: Array, count: int) -> Array | None:
    """Some tokens with the `count` first among them, ids ascending; None where `count` is too many for that.

    With the vocabulary folded into columns, `count` column maxima bound the last one's value from below.
    """
    width = len(values) // FOLD
    if count > width:
        return None
    maxima = values[: width * FOLD].reshape(FOLD, width).max(axis=0)
    return at_least(values, float(np.partition(maxima, width - count)[width - count]))


def _nth_largest(values: Array, count: int) -> float:
    return float(np.partition(values, len(values) - count)[len(values) - count])
