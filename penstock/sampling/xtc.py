"""XTC, "exclude top choices": now and then all likely tokens but the least likely of them are left out."""

from __future__ import annotations

import numpy as np

from penstock.sampling.arrays import Array


def xtc(weights: Array, threshold: float) -> Array:
    """Places of the tokens that stay: where several have a probability of `threshold` or more, only the last of those
    does, of equals the one with the highest id. Weights are in the order of ids."""
    whole = float(weights.sum(dtype=np.float64))
    likely = np.flatnonzero((weights >= threshold * whole) & (weights > 0))
    stays = weights > 0
    if len(likely) > 1:
        least = weights[likely].min()
        kept = likely[weights[likely] == least][-1]
        stays[likely] = False
        stays[kept] = True
    return np.flatnonzero(stays)
