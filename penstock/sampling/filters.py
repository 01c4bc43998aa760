"""From edited logits to the tokens that may be drawn, and their weights.

The order is top_n_sigma, temperature, min_p, top_k, top_p, typical_p. min_p and top_k both keep the likeliest so many
and neither looks at the sum, so their order does not matter and top_k, which needs no exponentials, runs first. top_p
and then typical_p each see the distribution that is left, normalised anew. A token whose weight is 0 is never drawn.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from penstock.ops import weight_sums
from penstock.sampling.arrays import Array
from penstock.sampling.draw import crossing
from penstock.sampling.likeliest import at_least, first, largest
from penstock.types import SamplingParams

FLOAT32 = np.finfo(np.float32)
FLOORS = (2.0**-6, 2.0**-12)
SLACK = 1e-5  # more than rounding makes of a logit's distance to the likeliest


def candidates(
    logits: Array, top: float, sampling: SamplingParams, temperature: float | None = None
) -> tuple[Array | None, Array]:
    """Token ids, ascending (None: the whole vocabulary), and a weight for each; `top` is the largest logit.
    `temperature` is that of `sampling` unless another is given."""
    temperature = sampling.temperature if temperature is None else temperature
    ids, mass = None, sampling.top_p
    if 0 < sampling.top_k < len(logits):
        ids = largest(logits, sampling.top_k)
    elif sampling.min_p > 0:
        ids = _within(logits, top, temperature, sampling.min_p)
    elif mass < 1:
        found = _nucleus(logits, top, temperature, mass)
        if found is not None:
            ids, mass = found, 1.0
    weights = temper(logits if ids is None else logits[ids], top, temperature)
    if sampling.min_p > 0:
        ids, weights = narrow(ids, weights, min_p(weights, sampling.min_p))
    if mass < 1:
        ids, weights = narrow(ids, weights, top_p(weights, mass))
    if sampling.typical_p < 1:
        ids, weights = narrow(ids, weights, typical_p(weights, sampling.typical_p))
    return ids, weights


def at_least_as_likely(logits: Array, top: float, temperature: float, share: float) -> tuple[Array | None, Array]:
    """Ids and weights of the tokens at least `share` times as likely as the likeliest; of all where `share` is 0."""
    ids = _within(logits, top, temperature, share) if share > 0 else None
    weights = temper(logits if ids is None else logits[ids], top, temperature)
    return narrow(ids, weights, min_p(weights, share))


def top_n_sigma(logits: Array, top: float, n: float) -> Array:
    """The logits within n standard deviations of the largest, in a copy, and -inf for the others; what is impossible
    already counts in neither."""
    possible = logits[logits > -np.inf].astype(np.float64)
    least = top - n * float(possible.std())
    return np.where(logits >= least, logits, np.float32(-np.inf))


def _within(logits: Array, top: float, temperature: float, share: float) -> Array:
    """Every token at least `share` times as likely as the likeliest, and perhaps a few that are almost."""
    least = top + _bounded(temperature) * (math.log(share) - SLACK)
    return at_least(logits, max(least - SLACK * abs(least), -float(FLOAT32.max)))


def _nucleus(logits: Array, top: float, temperature: float, mass: float) -> Array | None:
    """As `top_p` of all tokens, found among a few likely ones; None where these do not suffice."""
    needed = mass * float(tempered_sums(logits, top, temperature).sum())
    for floor in FLOORS:
        ids = _within(logits, top, temperature, floor)
        if len(ids) > len(logits) // 8:
            return None
        weights = temper(logits[ids], top, temperature)
        if float(weights.sum(dtype=np.float64)) >= needed:
            return np.asarray(ids[_reaching(weights, weights, needed)])
    return None


def _bounded(temperature: float) -> float:
    return min(max(temperature, float(FLOAT32.tiny)), float(FLOAT32.max))


def temper(logits: Array, top: float, temperature: float) -> Array:
    """Weights proportional to the probabilities; the likeliest token's is 1, so nothing overflows."""
    with np.errstate(over="ignore"):
        weights: Array = logits - np.float32(top)
        weights /= np.float32(_bounded(temperature))
    np.exp(weights, out=weights)
    return weights


def tempered_sums(logits: Array, top: float, temperature: float) -> Array:
    """Sums of the weights of each 1,024 tokens, float64."""
    scales = torch.tensor([[top], [_bounded(temperature)]], dtype=torch.float32)
    sums: Array = weight_sums(torch.from_numpy(logits)[None], scales[0], scales[1])[0].numpy()
    return sums.astype(np.float64)


def min_p(weights: Array, share: float) -> Array:
    """Places of the tokens at least `share` times as likely as the likeliest."""
    return np.flatnonzero(weights >= share)


def top_p(weights: Array, mass: float) -> Array:
    """Places of the fewest likeliest tokens whose probabilities sum to `mass` or more."""
    needed = mass * float(weights.sum(dtype=np.float64))
    return _reaching(weights, _likely(weights, needed), needed)


def _reaching(weights: Array, likely: Array, needed: float) -> Array:
    """Places of the fewest likeliest tokens whose weights sum to `needed`; `likely` are the weights of enough."""
    descending = np.sort(likely)[::-1]
    last = crossing(descending, needed, "reach")
    return first(weights, float(descending[last]), last + 1)


def typical_p(weights: Array, mass: float) -> Array:
    """Places of the fewest tokens, those whose surprise is nearest the entropy first, that sum to `mass` or more."""
    places = np.flatnonzero(weights)
    probabilities = weights[places].astype(np.float64)
    probabilities /= probabilities.sum()
    surprise = -np.log(probabilities)
    distance = np.abs(surprise - (probabilities * surprise).sum())
    order = np.argsort(distance)
    last = crossing(probabilities[order], mass, "reach")
    kept = first(-distance, -float(distance[order[last]]), last + 1)
    return np.asarray(places[kept])


def _likely(weights: Array, needed: float) -> Array:
    """The weights of some likeliest tokens that sum to `needed`: few where few suffice, else all."""
    for floor in FLOORS:
        likely = weights >= floor
        if np.count_nonzero(likely) > len(weights) // 8:
            break
        if float(weights[likely].sum(dtype=np.float64)) >= needed:
            return weights[likely]
    return weights


def narrow(ids: Array | None, weights: Array, kept: Array) -> tuple[Array, Array]:
    return (kept if ids is None else ids[kept]), weights[kept]
