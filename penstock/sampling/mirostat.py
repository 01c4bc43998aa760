"""Mirostat 1 and 2: a cut that is moved after each token, so that answers are as surprising as asked.

Both cut at `mu`, in bits: version 2 leaves out tokens that are more surprising, version 1 keeps as many as would be
less surprising if probabilities fell as Zipf's law says. `mu` follows from all tokens before: it is kept with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.sampling.arrays import Array

NUM_ESTIMATED = 100  # likeliest tokens from which version 1 estimates the law's exponent
MAX_MU = 1e6
MIN_EXPONENT = 1e-6


def first_mu(tau: float) -> float:
    return 2 * tau


def next_mu(mu: float, probability: float, tau: float, eta: float) -> float:
    """After a token of that probability among those that were left."""
    surprise = -math.log2(probability)
    return min(max(mu - eta * (surprise - tau), -MAX_MU), MAX_MU)


def num_kept(ranked: Sequence[float] | Array, temperature: float, mu: float, vocab_size: int) -> int:
    """Version 1: how many tokens to keep, from the largest logits, largest first."""
    values = np.asarray(ranked, dtype=np.float64)
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return 1
    place = np.arange(1, len(values))
    steps = np.log((place + 1) / place)
    falls = (values[:-1] - values[1:]) / temperature
    exponent = max(float((steps * falls).sum() / (steps * steps).sum()), MIN_EXPONENT)
    over = exponent - 1
    log_size = math.log(vocab_size)
    # over / (1 - vocab_size ** -over), whose limit at 0 is 1 / log(vocab_size)
    factor = 1 / log_size if abs(over) < 1e-6 else over / -math.expm1(-over * log_size)
    log_count = (math.log(factor) + mu * math.log(2)) / exponent
    return int(min(max(math.exp(min(max(log_count, -1.0), 50.0)), 1.0), vocab_size))


def least_weight(total: float, mu: float) -> float:
    """Version 2: the weight, where the likeliest token has 1, of a token whose surprise is `mu` bits."""
    return float(min(1.0, total * 2.0 ** min(max(-mu, -1000.0), 1000.0)))
