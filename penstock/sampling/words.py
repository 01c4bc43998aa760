"""Sets of tokens as bits in 32-bit words, the form in which a device reads which tokens are allowed."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def every_token(size: int) -> Array:
    return np.full(-(-size // 32), -1, dtype=np.int32)


def no_token(size: int) -> Array:
    return np.zeros(-(-size // 32), dtype=np.int32)


def add(words: Array, ids: Array) -> None:
    """Enter tokens; those past the end name nothing."""
    ids = ids[ids < 32 * len(words)]
    np.bitwise_or.at(words.view(np.uint32), ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))


def remove(words: Array, ids: Array) -> None:
    ids = ids[ids < 32 * len(words)]
    np.bitwise_and.at(words.view(np.uint32), ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))
