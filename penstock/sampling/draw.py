"""One draw by inverting the cumulative distribution in vocabulary order, summed in float64 in a fixed order."""

from __future__ import annotations

from typing import Literal

import numpy as np

Array = np.ndarray

BLOCK = 1024


def draw(weights: Array, share: float) -> int:
    """The place where the running sum exceeds `share` (in [0, 1)) of the whole; its weight is never 0."""
    sums = _block_sums(weights)
    return crossing(weights, share * float(np.cumsum(sums)[-1]), "exceed", sums)


def draw_piece(sums: Array, share: float) -> tuple[int, float]:
    """The same, as far as the sums of each 1,024 weights tell: which of them, and what is left to exceed in it."""
    return _step(sums, share * float(np.cumsum(sums)[-1]), "exceed")


def crossing(weights: Array, target: float, how: Literal["exceed", "reach"], sums: Array | None = None) -> int:
    """First place whose running sum exceeds or reaches `target`, or the place of the last step of the sum.

    Blocks of 1,024 are summed first and only the block that crosses is walked.
    """
    block, rest = _step(_block_sums(weights) if sums is None else sums, target, how)
    place, _ = _step(weights[block * BLOCK : (block + 1) * BLOCK], rest, how)
    return block * BLOCK + place


def _block_sums(weights: Array) -> Array:
    return np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64)


def _step(weights: Array, target: float, how: Literal["exceed", "reach"]) -> tuple[int, float]:
    """Where the running sum crosses, and what of the target is left before that place."""
    running = np.cumsum(weights, dtype=np.float64)
    # Rounding may leave the target at or past the end: the last place that adds anything is meant then.
    target = min(target, float(np.nextafter(running[-1], 0)) if how == "exceed" else float(running[-1]))
    place = int(np.searchsorted(running, target, side="right" if how == "exceed" else "left"))
    return place, target - (float(running[place - 1]) if place else 0.0)
