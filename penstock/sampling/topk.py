"""Order the tokens of one float32 row [V]: higher value first, lower id on ties."""

from __future__ import annotations

import math

import numpy as np
import torch

from penstock.ops import above
from penstock.sampling.logits import Array, UnusableLogits

FOLD = 64
ROOM = 2048  # ids listed at a time; longer lists are found by numpy


DAMAGED = "the model's logits contain NaN or infinity: its weights or its arithmetic are damaged"


def argmax(values: Array) -> int:
    """Return the first token in the order; raise UnusableLogits for NaN, +inf or nothing but -inf."""
    token = int(values.argmax())  # argmax takes NaN for the largest, and the lowest id on ties
    top = float(values[token])
    if math.isfinite(top):
        return token
    if math.isnan(top):
        raise UnusableLogits("the model's logits contain NaN: its weights or its arithmetic are damaged")
    if top > 0:
        raise UnusableLogits("the model's logits contain +inf: its weights or its arithmetic are damaged")
    raise UnusableLogits(f"all {len(values)} logits are -inf: no token is left to sample")


def keep_first(values: Array, threshold: float, count: int) -> Array:
    """Return the first `count` tokens, ids ascending; `threshold` is the value of the last of them."""
    kept = values > threshold
    equal = np.flatnonzero(values == threshold)
    kept[equal[: count - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def find_at_least(values: Array, threshold: float) -> Array:
    """Return the tokens of value `threshold` or more, ids ascending."""
    found: Array = above(torch.from_numpy(values)[None], torch.tensor([threshold], dtype=torch.float32), ROOM)[
        0
    ].numpy()
    count = int(found[0])
    return found[1 : 1 + count].astype(np.int64) if count <= ROOM else np.flatnonzero(values >= np.float32(threshold))


def top_k_ids(values: Array, count: int) -> Array:
    """Return the first `count` tokens, ids ascending."""
    if not 0 < count < len(values):
        return np.arange(min(count, len(values)))
    few = _shortlist(values, count)
    if few is None:
        return keep_first(values, _nth_largest(values, count), count)
    kept = values[few]
    return np.asarray(few[keep_first(kept, _nth_largest(kept, count), count)])


def rank_top_k(values: Array, count: int) -> Array:
    """Return the first `count` tokens, likeliest first."""
    ids = top_k_ids(values, count)
    return ids[np.argsort(-values[ids], kind="stable")]


def rank(values: Array, token: int) -> int:
    """Return the rank of `token`, from 1."""
    value = values[token]
    return 1 + int(np.count_nonzero(values > value)) + int(np.count_nonzero(values[:token] == value))


def _shortlist(values: Array, count: int) -> Array | None:
    """Return a short list of tokens that contains the first `count`, ids ascending; None if `count` is too large.

    Fold the vocabulary into columns: the `count` largest column maxima bound the last value from below.
    """
    width = len(values) // FOLD
    if count > width:
        return None
    maxima = values[: width * FOLD].reshape(FOLD, width).max(axis=0)
    return find_at_least(values, float(np.partition(maxima, width - count)[width - count]))


def _nth_largest(values: Array, count: int) -> float:
    return float(np.partition(values, len(values) - count)[len(values) - count])
