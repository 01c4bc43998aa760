"""Filter edited logits into candidate tokens and their weights.

Order: top_n_sigma, temperature, min_p, top_k, top_p, typical_p. min_p and top_k commute, so top_k, which needs no
exponentials, runs first. top_p and typical_p each renormalise what is left. A token of weight 0 is never drawn.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from penstock.ops import weight_sums
from penstock.sampling.draw import find_crossing
from penstock.sampling.logits import Array
from penstock.sampling.topk import find_at_least, keep_first, top_k_ids
from penstock.types import SamplingParams

FLOAT32 = np.finfo(np.float32)
FLOORS = (2.0**-6, 2.0**-12)
SLACK = 1e-5  # above the rounding error of a logit's distance to the maximum


def apply_filters(
    logits: Array, top: float, sampling: SamplingParams, temperature: float | None = None
) -> tuple[Array | None, Array]:
    """Return the ids that filters keep, ascending (None: all), and their weights; `top` is the largest logit.

    `temperature` overrides that of `sampling`.
    """
    temperature = sampling.temperature if temperature is None else temperature
    ids, mass = None, sampling.top_p
    if 0 < sampling.top_k < len(logits):
        ids = top_k_ids(logits, sampling.top_k)
    elif sampling.min_p > 0:
        ids = _find_within(logits, top, temperature, sampling.min_p)
    elif mass < 1:
        found = _find_nucleus(logits, top, temperature, mass)
        if found is not None:
            ids, mass = found, 1.0
    weights = apply_temperature(logits if ids is None else logits[ids], top, temperature)
    if sampling.min_p > 0:
        ids, weights = narrow(ids, weights, min_p(weights, sampling.min_p))
    if mass < 1:
        ids, weights = narrow(ids, weights, top_p(weights, mass))
    if sampling.typical_p < 1:
        ids, weights = narrow(ids, weights, typical_p(weights, sampling.typical_p))
    return ids, weights


def apply_min_p(logits: Array, top: float, temperature: float, share: float) -> tuple[Array | None, Array]:
    """Return ids and weights of tokens at least `share` times as likely as the likeliest (0: all)."""
    ids = _find_within(logits, top, temperature, share) if share > 0 else None
    weights = apply_temperature(logits if ids is None else logits[ids], top, temperature)
    return narrow(ids, weights, min_p(weights, share))


def top_n_sigma(logits: Array, top: float, n: float) -> Array:
    """Return a copy with logits more than n standard deviations below the largest set to -inf.

    Logits that are -inf already do not count towards the deviation.
    """
    possible = logits[logits > -np.inf].astype(np.float64)
    least = top - n * float(possible.std())
    return np.where(logits >= least, logits, np.float32(-np.inf))


def _find_within(logits: Array, top: float, temperature: float, share: float) -> Array:
    """Return every token at least `share` times as likely as the likeliest, and perhaps a few just below."""
    least = top + _clamp_temperature(temperature) * (math.log(share) - SLACK)
    return find_at_least(logits, max(least - SLACK * abs(least), -float(FLOAT32.max)))


def _find_nucleus(logits: Array, top: float, temperature: float, mass: float) -> Array | None:
    """Compute `top_p` from a few likely tokens; None if they do not reach `mass`."""
    needed = mass * float(compute_weight_sums(logits, top, temperature).sum())
    for floor in FLOORS:
        ids = _find_within(logits, top, temperature, floor)
        if len(ids) > len(logits) // 8:
            return None
        weights = apply_temperature(logits[ids], top, temperature)
        if float(weights.sum(dtype=np.float64)) >= needed:
            return np.asarray(ids[_keep_until(weights, weights, needed)])
    return None


def _clamp_temperature(temperature: float) -> float:
    return min(max(temperature, float(FLOAT32.tiny)), float(FLOAT32.max))


def apply_temperature(logits: Array, top: float, temperature: float) -> Array:
    """Return weights proportional to the probabilities; the likeliest token's is 1, so nothing overflows."""
    with np.errstate(over="ignore"):
        weights: Array = logits - np.float32(top)
        weights /= np.float32(_clamp_temperature(temperature))
    np.exp(weights, out=weights)
    return weights


def compute_weight_sums(logits: Array, top: float, temperature: float) -> Array:
    """Sum the weights of each block of 1,024 tokens in float64."""
    scales = torch.tensor([[top], [_clamp_temperature(temperature)]], dtype=torch.float32)
    sums: Array = weight_sums(torch.from_numpy(logits)[None], scales[0], scales[1])[0].numpy()
    return sums.astype(np.float64)


def min_p(weights: Array, share: float) -> Array:
    """Return the indices of tokens at least `share` times as likely as the likeliest."""
    return np.flatnonzero(weights >= share)


def top_p(weights: Array, mass: float) -> Array:
    """Return the indices of the fewest likeliest tokens whose probabilities sum to `mass` or more."""
    needed = mass * float(weights.sum(dtype=np.float64))
    return _keep_until(weights, _preselect(weights, needed), needed)


def _keep_until(weights: Array, likely: Array, needed: float) -> Array:
    """Return the indices of the fewest likeliest tokens that sum to `needed`; `likely` holds enough of them."""
    descending = np.sort(likely)[::-1]
    last = find_crossing(descending, needed, "reach")
    return keep_first(weights, float(descending[last]), last + 1)


def typical_p(weights: Array, mass: float) -> Array:
    """Return the indices of the fewest tokens that sum to `mass`, nearest to the entropy first."""
    places = np.flatnonzero(weights)
    probabilities = weights[places].astype(np.float64)
    probabilities /= probabilities.sum()
    surprise = -np.log(probabilities)
    distance = np.abs(surprise - (probabilities * surprise).sum())
    order = np.argsort(distance)
    last = find_crossing(probabilities[order], mass, "reach")
    kept = keep_first(-distance, -float(distance[order[last]]), last + 1)
    return np.asarray(places[kept])


def _preselect(weights: Array, needed: float) -> Array:
    """Return the weights of some likeliest tokens that sum to `needed`; all weights if many are needed."""
    for floor in FLOORS:
        likely = weights >= floor
        if np.count_nonzero(likely) > len(weights) // 8:
            break
        if float(weights[likely].sum(dtype=np.float64)) >= needed:
            return weights[likely]
    return weights


def narrow(ids: Array | None, weights: Array, kept: Array) -> tuple[Array, Array]:
    return (kept if ids is None else ids[kept]), weights[kept]
