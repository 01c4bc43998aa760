"""Samplers that keep state per row (DRY and mirostat), and the rare parameters packed for the device.

Mirostat moves a surprise cut-off, `mu` bits, after each token towards a target. Version 2 drops tokens that are more
surprising; version 1 keeps the number that Zipf's law predicts to be less surprising. `mu` depends on all earlier
tokens, so it is stored with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.ops.sampling import extras as columns
from penstock.ops.sampling.extras import OFF
from penstock.sampling.logits import Array
from penstock.sampling.rare.dry import Dry, max_match_length
from penstock.types import MAX_LOOKBACK, Request, SamplingParams

NUM_ESTIMATED = 100  # likeliest tokens from which version 1 estimates Zipf's exponent
MAX_MU = 1e6
MIN_EXPONENT = 1e-6


def first_mu(tau: float) -> float:
    return 2 * tau


def next_mu(mu: float, probability: float, tau: float, eta: float) -> float:
    """Update mu after a token of this probability among those kept."""
    surprise = -math.log2(probability)
    return min(max(mu - eta * (surprise - tau), -MAX_MU), MAX_MU)


def num_kept(ranked: Sequence[float] | Array, temperature: float, mu: float, vocab_size: int) -> int:
    """Version 1: return the number of tokens to keep; `ranked` holds the largest logits, descending."""
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
    # over / (1 - vocab_size ** -over); its limit at 0 is 1 / log(vocab_size)
    factor = 1 / log_size if abs(over) < 1e-6 else over / -math.expm1(-over * log_size)
    log_count = (math.log(factor) + mu * math.log(2)) / exponent
    return int(min(max(math.exp(min(max(log_count, -1.0), 50.0)), 1.0), vocab_size))


def min_weight(total: float, mu: float) -> float:
    """Version 2: return the weight (the likeliest token has 1) of a token whose surprise is `mu` bits."""
    return float(min(1.0, total * 2.0 ** min(max(-mu, -1000.0), 1000.0)))


class StatefulSamplers:
    """DRY and mirostat state of one row. `mu` resumes mirostat in a row that continues from elsewhere."""

    def __init__(self, request: Request, tokens: Sequence[int], mu: float | None = None) -> None:
        sampling = request.sampling
        plain = request.beam is not None
        self.dry = Dry(sampling, request.dry_breakers, tokens) if sampling.has_dry and not plain else None
        self._mus: list[float] = []  # after the text, and after each token appended since
        if sampling.mirostat and not sampling.greedy and not plain:
            self._mus.append(first_mu(sampling.mirostat_tau) if mu is None else mu)
        self._length = len(tokens)

    @property
    def mu(self) -> float | None:
        return self._mus[-1] if self._mus else None

    def append(self, token: int, mu: float | None) -> None:
        """Append `token`; `mu` is mirostat's after it."""
        if self.dry is not None:
            self.dry.append(token)
        if self._mus:
            self._mus.append(self._mus[-1] if mu is None else mu)
        self._length += 1

    def truncate(self, length: int) -> None:
        if self.dry is not None:
            self.dry.truncate(length)
        if self._mus:
            del self._mus[len(self._mus) - (self._length - length) :]
        self._length = length

    def edit(self, logits: Array) -> None:
        if self.dry is not None:
            self.dry.apply(logits)


STRONGEST = 1e38  # fits float32


def pack_extras(sampling: SamplingParams, mu: float | None, window: int, num_prompt: int) -> list[float]:
    """Return the columns of `ops.sampling.extras`. `window`: tokens that penalties look back on (0: all)."""
    values: dict[int, float] = {columns.WINDOW: window, columns.NUM_PROMPT: num_prompt}
    if sampling.has_dry:
        last_n = sampling.dry_penalty_last_n
        values |= {
            columns.DRY_MULTIPLIER: sampling.dry_multiplier,
            columns.DRY_BASE: sampling.dry_base,
            columns.DRY_ALLOWED: sampling.dry_allowed_length,
            columns.DRY_LAST_N: MAX_LOOKBACK if last_n < 0 else min(last_n, MAX_LOOKBACK),
            columns.DRY_MAX_MATCH: max_match_length(float(sampling.dry_base), sampling.dry_allowed_length),
        }
    if mu is not None:
        values |= {
            columns.MIROSTAT: sampling.mirostat,
            columns.MIROSTAT_TAU: sampling.mirostat_tau,
            columns.MIROSTAT_ETA: sampling.mirostat_eta,
            columns.MU: min(max(mu, -MAX_MU), MAX_MU),
        }
    elif not sampling.greedy:
        values |= {
            columns.N_SIGMA: min(max(sampling.top_n_sigma, 0.0), STRONGEST),
            columns.DYNATEMP_RANGE: sampling.dynatemp_range,
            columns.DYNATEMP_EXPONENT: sampling.dynatemp_exponent,
        }
        if sampling.has_xtc:
            values |= {columns.XTC_PROBABILITY: sampling.xtc_probability, columns.XTC_THRESHOLD: sampling.xtc_threshold}
    return [float(values.get(column, off)) for column, off in enumerate(OFF)]
