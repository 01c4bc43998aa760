"""Counter-based randomness: a draw is a function of where it is used, never of what was drawn before."""

from __future__ import annotations

from enum import IntEnum

# Philox 4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF


class Purpose(IntEnum):
    """What a draw is for. A new use takes a new number, so no two uses at one position share a value."""

    TOKEN = 0
    XTC = 1


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words from a counter of four and a key of two."""
    a, b, c, d = counter
    p, q = key
    for _ in range(ROUNDS):
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (second >> 32) ^ b ^ p, second & WORD, (first >> 32) ^ d ^ q, first & WORD
        p, q = (p + WEYL[0]) & WORD, (q + WEYL[1]) & WORD
    return a, b, c, d


def uniform(seed: int, sibling: int, position: int, purpose: int = Purpose.TOKEN) -> float:
    """A number in [0, 1) with 53 random bits; negative seeds are read as 64-bit two's complement."""
    key = (seed & WORD, seed >> 32 & WORD)
    high, low, _, _ = philox((position & WORD, position >> 32 & WORD, sibling, purpose), key)
    return ((high >> 5) * 2**26 + (low >> 6)) / 2**53
