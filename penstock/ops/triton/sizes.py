"""Numbers of programs and of their values. Triton's own functions for these take longer than some kernels do."""

from __future__ import annotations

from math import log2

MOST_NORMED = 4096


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least that is not under n."""
    return 1 << max(0, n - 1).bit_length()


def nearest_power_of_2(x: float) -> int:
    return 1 << max(0, round(log2(x)))


def norm_block(width: int) -> int:
    """Values that are read at once to norm so many: all of them, unless they are very many."""
    return min(MOST_NORMED, power_of_2(width))
