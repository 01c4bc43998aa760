"""The sampler chain: filter one row's logits, then draw.

Order: top_n_sigma, temperature, min_p, top_k, top_p, typical_p, XTC. Dynamic temperature comes last, after filters at
temperature 1. Mirostat replaces all filters and follows the temperature.
"""

from __future__ import annotations

import numpy as np

from penstock.sampling.draw import Purpose, draw, uniform
from penstock.sampling.filters import (
    apply_filters,
    apply_min_p,
    apply_temperature,
    compute_weight_sums,
    narrow,
    top_n_sigma,
)
from penstock.sampling.logits import Array
from penstock.sampling.rare.stateful import NUM_ESTIMATED, min_weight, next_mu, num_kept
from penstock.sampling.row import RowState
from penstock.sampling.topk import argmax, rank_top_k, top_k_ids
from penstock.types import SamplingParams


def xtc(weights: Array, threshold: float) -> Array:
    """Return the indices of tokens to keep. Of several at `threshold` or above only the least likely stays (on ties the
    highest id). Weights are in id order."""
    whole = float(weights.sum(dtype=np.float64))
    likely = np.flatnonzero((weights >= threshold * whole) & (weights > 0))
    stays = weights > 0
    if len(likely) > 1:
        least = weights[likely].min()
        kept = likely[weights[likely] == least][-1]
        stays[likely] = likely == kept
    return np.flatnonzero(stays)


def dynamic_temperature(weights: Array, sampling: SamplingParams) -> float:
    """Scale from `temperature - dynatemp_range` (one certain token) to `temperature + dynatemp_range` (all equally
    likely), by normalised entropy ** `dynatemp_exponent`."""
    lowest = max(0.0, sampling.temperature - sampling.dynatemp_range)
    highest = sampling.temperature + sampling.dynatemp_range
    probabilities = weights[weights > 0].astype(np.float64)
    if len(probabilities) < 2:
        return sampling.temperature
    probabilities /= probabilities.sum()
    entropy = -float((probabilities * np.log(probabilities)).sum()) / float(np.log(len(probabilities)))
    return float(lowest + (highest - lowest) * min(max(entropy, 0.0), 1.0) ** sampling.dynatemp_exponent)


def filter_and_draw(logits: Array, top: float, row: RowState) -> tuple[int, float | None]:
    """Return a token and the mirostat mu after it; `top` is the largest logit."""
    mu = row.samplers.mu
    ids, weights = apply_chain(logits, top, row) if mu is None else _filter_by_mirostat(logits, top, row, mu)
    place = draw(weights, uniform(row.request.seed, row.sibling, len(row.tokens), Purpose.TOKEN))
    if mu is not None:
        sampling = row.request.sampling
        probability = float(weights[place]) / float(weights.sum(dtype="float64"))
        mu = next_mu(mu, probability, sampling.mirostat_tau, sampling.mirostat_eta)
    return (place if ids is None else int(ids[place])), mu


def apply_chain(logits: Array, top: float, row: RowState) -> tuple[Array | None, Array]:
    """Return the ids (None: all) and weights that the filters keep."""
    sampling = row.request.sampling
    if sampling.top_n_sigma > 0:
        logits = top_n_sigma(logits, top, sampling.top_n_sigma)
    is_dynamic = sampling.dynatemp_range > 0
    ids, weights = apply_filters(logits, top, sampling, 1.0 if is_dynamic else sampling.temperature)
    if sampling.has_xtc:
        chance = uniform(row.request.seed, row.sibling, len(row.tokens), Purpose.XTC)
        if chance < sampling.xtc_probability:
            ids, weights = narrow(ids, weights, xtc(weights, sampling.xtc_threshold))
    if is_dynamic:
        left = logits if ids is None else logits[ids]
        weights = apply_temperature(left, float(left.max()), dynamic_temperature(weights, sampling))
    return ids, weights


def find_shares(logits: Array, row: RowState) -> Array:
    """Return the probability of each token [V] after the row's penalties, masks and filters; raises UnusableLogits."""
    edited, sampling, mu = row.edit(logits), row.request.sampling, row.samplers.mu
    likeliest = argmax(edited)
    top, shares = float(edited[likeliest]), np.zeros(len(logits))
    if sampling.greedy:
        shares[likeliest] = 1.0
        return shares
    ids: Array | None = None
    if mu is not None:
        ids, weights = _filter_by_mirostat(edited, top, row, mu)
    elif row.has_filters:
        ids, weights = apply_chain(edited, top, row)
    else:
        weights = apply_temperature(edited, top, sampling.temperature)
    shares[slice(None) if ids is None else ids] = weights / weights.sum(dtype=np.float64)
    return shares


def _filter_by_mirostat(logits: Array, top: float, row: RowState, mu: float) -> tuple[Array | None, Array]:
    heat = row.request.sampling.temperature
    if row.request.sampling.mirostat == 1:
        argmax = logits[rank_top_k(logits, min(NUM_ESTIMATED, len(logits)))]
        ids = top_k_ids(logits, num_kept(argmax, heat, mu, len(logits)))
        return ids, apply_temperature(logits[ids], top, heat)
    return apply_min_p(logits, top, heat, min_weight(float(compute_weight_sums(logits, top, heat).sum()), mu))
