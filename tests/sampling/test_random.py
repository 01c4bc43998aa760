from __future__ import annotations

import itertools

import pytest

from penstock.sampling.draw import Purpose, philox, uniform

# Counter, key, answer: the philox4x32-10 lines of kat_vectors in the Random123 distribution.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    assert philox(counter, key) == answer


def test_uniform_is_pinned() -> None:
    """Breaks when the layout of counter or key changes: every seeded answer would silently be another."""
    assert uniform(0, 0, 0, 0) == ((0x6627E8D5 >> 5 << 26) + (0xE169C58D >> 6)) / 2**53
    counter, key = (0x85A308D3, 0x243F6A88, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    high, low, _, _ = philox(counter, key)
    drawn = uniform(0x299F31D0_A4093822, 0x13198A2E, 0x243F6A88_85A308D3, 0x03707344)
    assert drawn == ((high >> 5 << 26) + (low >> 6)) / 2**53


def test_53_bits_below_one() -> None:
    drawn = [uniform(1, 0, position, Purpose.TOKEN) for position in range(4000)]
    assert all(0 <= value < 1 and (value * 2**53).is_integer() for value in drawn)
    assert 1800 < sum(int(value * 2**53) % 2 for value in drawn) < 2200  # the lowest bit is random too


def test_each_argument_matters_alone() -> None:
    """Breaks when an argument, or the upper half of a wide one, does not reach the counter or key."""
    variants = [
        (5, 0, 9, 0),
        (6, 0, 9, 0),
        (5 + 2**32, 0, 9, 0),
        (5 + 2**63, 0, 9, 0),
        (5, 1, 9, 0),
        (5, 0, 10, 0),
        (5, 0, 9 + 2**32, 0),
        (5, 0, 9, 1),
        (9, 0, 5, 0),
        (0, 5, 9, 0),
    ]
    assert len({uniform(*arguments) for arguments in variants}) == len(variants)


def test_negative_seeds_are_64_bit() -> None:
    assert uniform(-1, 0, 3, 0) == uniform(2**64 - 1, 0, 3, 0)
    assert uniform(-(2**63), 0, 3, 0) == uniform(2**63, 0, 3, 0) != uniform(0, 0, 3, 0)


@pytest.mark.parametrize("vary", ["position", "sibling", "seed", "purpose"])
def test_evenly_spread_and_uncorrelated_along_each_argument(vary: str) -> None:
    """Chi-square over 64 cells (63 degrees of freedom: 99.99 % are below 114) and lag-1 correlation."""
    drawn = [uniform(**{"seed": 11, "sibling": 0, "position": 100, "purpose": 0, vary: i}) for i in range(12_800)]
    cells = [0] * 64
    for value in drawn:
        cells[int(value * 64)] += 1
    assert sum((count - 200) ** 2 / 200 for count in cells) < 114
    lag = sum((a - 0.5) * (b - 0.5) for a, b in itertools.pairwise(drawn)) / len(drawn) * 12
    assert abs(lag) < 0.04
