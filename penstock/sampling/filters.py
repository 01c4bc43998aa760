"""From edited logits to the tokens that may be drawn, and their weights.

The order is temperature, min_p, top_k, top_p, typical_p. min_p and top_k both keep the likeliest so many and neither
looks at the sum, so their order does not matter and top_k, which needs no exponentials, runs first. top_p and then
typical_p each see the distribution that is left, normalised anew. A token whose weight is 0 is never drawn.
"""

from __future__ import annotations

import numpy as np

from penstock.sampling.draw import crossing
from penstock.sampling.likeliest import Array, first, largest
from penstock.types import SamplingParams

FLOAT32 = np.finfo(np.float32)
FLOORS = (2.0**-6, 2.0**-12)


def candidates(logits: Array, top: float, sampling: SamplingParams) -> tuple[Array | None, Array]:
    """Token ids, ascending (None: the whole vocabulary), and a weight for each; `top` is the largest logit."""
    ids = None
    if 0 < sampling.top_k < len(logits):
        ids = largest(logits, sampling.top_k)
        logits = logits[ids]
    weights = temper(logits, top, sampling.temperature)
    if sampling.min_p > 0:
        ids, weights = _narrow(ids, weights, min_p(weights, sampling.min_p))
    if sampling.top_p < 1:
        ids, weights = _narrow(ids, weights, top_p(weights, sampling.top_p))
    if sampling.typical_p < 1:
        ids, weights = _narrow(ids, weights, typical_p(weights, sampling.typical_p))
    return ids, weights


def temper(logits: Array, top: float, temperature: float) -> Array:
    """Weights proportional to the probabilities; the likeliest token's is 1, so nothing overflows."""
    bounded = min(max(temperature, float(FLOAT32.tiny)), float(FLOAT32.max))
    with np.errstate(over="ignore"):
        weights: Array = logits - np.float32(top)
        weights /= np.float32(bounded)
    np.exp(weights, out=weights)
    return weights


def min_p(weights: Array, share: float) -> Array:
    """Places of the tokens at least `share` times as likely as the likeliest."""
    return np.flatnonzero(weights >= share)


def top_p(weights: Array, mass: float) -> Array:
    """Places of the fewest likeliest tokens whose probabilities sum to `mass` or more."""
    needed = mass * float(weights.sum(dtype=np.float64))
    descending = np.sort(_likely(weights, needed))[::-1]
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


def _narrow(ids: Array | None, weights: Array, kept: Array) -> tuple[Array, Array]:
    return (kept if ids is None else ids[kept]), weights[kept]
