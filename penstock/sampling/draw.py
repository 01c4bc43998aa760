"""Random numbers, and the draw of a token by inverse CDF in vocabulary order, summed in float64 in a fixed order."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import numpy as np

from penstock.sampling.logits import Array

# Philox 4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF


class Purpose(IntEnum):
    """The use of a draw. A new use takes a new number, so no two uses at one position share a value."""

    TOKEN = 0
    XTC = 1
    DRAFT = 2  # a token that rejection sampling verifies
    ACCEPT = 3  # whether it does
    REST = 4  # the token instead


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Compute four 32-bit words from a counter of four and a key of two."""
    a, b, c, d = counter
    p, q = key
    for _ in range(ROUNDS):
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (second >> 32) ^ b ^ p, second & WORD, (first >> 32) ^ d ^ q, first & WORD
        p, q = (p + WEYL[0]) & WORD, (q + WEYL[1]) & WORD
    return a, b, c, d


def uniform(seed: int, sibling: int, position: int, purpose: int = Purpose.TOKEN) -> float:
    """Return a number in [0, 1) with 53 random bits; negative seeds are read as 64-bit two's complement."""
    key = (seed & WORD, seed >> 32 & WORD)
    high, low, _, _ = philox((position & WORD, position >> 32 & WORD, sibling, purpose), key)
    return ((high >> 5) * 2**26 + (low >> 6)) / 2**53


BLOCK = 1024


def draw(weights: Array, share: float) -> int:
    """Return the index where the cumulative sum exceeds `share` (in [0, 1)) of the total; its weight is never 0."""
    sums = _block_sums(weights)
    return find_crossing(weights, share * float(np.cumsum(sums)[-1]), "exceed", sums)


def draw_block(sums: Array, share: float) -> tuple[int, float]:
    """Return the 1,024-token block that `draw` falls into, given all block sums, and the sum left to exceed in it."""
    return _step(sums, share * float(np.cumsum(sums)[-1]), "exceed")


def find_crossing(weights: Array, target: float, how: Literal["exceed", "reach"], sums: Array | None = None) -> int:
    """Return the first index whose cumulative sum exceeds or reaches `target`, else the last that adds to the sum.

    Blocks of 1,024 are summed first; only the block that crosses is scanned.
    """
    block, rest = _step(_block_sums(weights) if sums is None else sums, target, how)
    place, _ = _step(weights[block * BLOCK : (block + 1) * BLOCK], rest, how)
    return block * BLOCK + place


def _block_sums(weights: Array) -> Array:
    return np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64)


def _step(weights: Array, target: float, how: Literal["exceed", "reach"]) -> tuple[int, float]:
    """Return the index where the cumulative sum crosses `target`, and the rest of `target` before it."""
    running = np.cumsum(weights, dtype=np.float64)
    # Rounding may push the target past the end: fall back to the last index that adds anything.
    target = min(target, float(np.nextafter(running[-1], 0)) if how == "exceed" else float(running[-1]))
    place = int(np.searchsorted(running, target, side="right" if how == "exceed" else "left"))
    return place, target - (float(running[place - 1]) if place else 0.0)
