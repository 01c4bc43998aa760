"""Which tokens come first: the higher value, on equal values the lower id. Values are one float32 row [V]."""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray

FOLD = 64


class UnusableLogits(ArithmeticError):
    """No token can be chosen from this row; the message says why."""


def likeliest(values: Array) -> int:
    """The first token; also the check that every value is a number and at least one is possible."""
    token = int(values.argmax())      # a NaN counts as the largest; of equals the lowest id is returned
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
    kept[equal[:count - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def largest(values: Array, count: int) -> Array:
    """The `count` first tokens, ids ascending."""
    if not 0 < count < len(values):
        return np.arange(min(count, len(values)))
    return first(values, _nth_largest(values, count), count)


def ranked(values: Array, count: int) -> Array:
    """The `count` first tokens, likeliest first."""
    ids = largest(values, count)
    return ids[np.argsort(-values[ids], kind="stable")]


def rank(values: Array, token: int) -> int:
    """Place of one token in the order, from 1."""
    value = values[token]
    return 1 + int(np.count_nonzero(values > value)) + int(np.count_nonzero(values[:token] == value))


def _nth_largest(values: Array, count: int) -> float:
    """Found among few: with the vocabulary folded into columns, `count` column maxima bound the answer from below."""
    width = len(values) // FOLD
    if count <= width:
        maxima = values[:width * FOLD].reshape(FOLD, width).max(axis=0)
        values = values[values >= np.partition(maxima, width - count)[width - count]]
    return float(np.partition(values, len(values) - count)[len(values) - count])
