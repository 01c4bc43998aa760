"""Integer helpers for launch grids, cheaper than Triton's own."""

from __future__ import annotations

from math import log2

from penstock.ops.triton.tuning import MAX_NORM_BLOCK


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def nearest_power_of_2(x: float) -> int:
    return 1 << max(0, round(log2(x)))


def norm_block(width: int) -> int:
    """Return how many values to read at once for the norm of a row of `width`."""
    return min(MAX_NORM_BLOCK, power_of_2(width))
