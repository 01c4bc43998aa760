from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.sampling.draw import BLOCK, draw, find_crossing

LAST = 1 - 2.0**-53


def _between(weights: np.ndarray, share: float, place: int) -> bool:
    """Whether, in exact arithmetic, the running sum passes the share at this place (up to float64's rounding)."""
    exact = [Fraction(float(weight)) for weight in weights]
    total, slack = sum(exact), Fraction(1, 10**11)
    before = sum(exact[:place])
    return before / total - slack <= share <= (before + exact[place]) / total + slack


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    length=st.sampled_from([1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]),
    share=st.one_of(st.floats(0, LAST), st.sampled_from([0.0, LAST])),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.0, 1.0, 8.0, 40.0]),
    zeros=st.sampled_from([0.0, 0.5, 0.99]),
)
def test_inverts_the_cumulative_sum_in_vocabulary_order(
    length: int, share: float, seed: int, spread: float, zeros: float
) -> None:
    random = np.random.default_rng(seed)
    weights = np.exp(-spread * random.random(length)).astype(np.float32)
    weights[random.random(length) < zeros] = 0
    weights[random.integers(length)] = 1
    place = draw(weights, share)
    assert weights[place] > 0
    assert _between(weights, share, place)


@pytest.mark.parametrize("share", [0.0, 0.5, LAST])
def test_a_weight_of_zero_is_never_drawn(share: float) -> None:
    """Breaks when the end of the sum is clamped to the last place instead of the last place that adds something."""
    weights = np.zeros(4 * BLOCK, dtype=np.float32)
    weights[5] = 1
    assert draw(weights, share) == 5
    weights[BLOCK + 3 : 2 * BLOCK - 3] = 1e-20  # each is lost when added to 1, their sum is not
    weights[BLOCK] = 1e-20
    assert weights[draw(weights, share)] > 0


def test_the_last_share_where_two_orders_of_summing_differ() -> None:
    """A block's sum may come out above its running sum: breaks when what is left of the target is not clamped to it."""
    for seed in range(300):
        weights = np.exp(-40 * np.random.default_rng(seed).random(BLOCK + 100)).astype(np.float32)
        weights[BLOCK - 50 :] = 0
        assert weights[draw(weights, LAST)] > 0


def test_shares_cut_where_the_sums_are() -> None:
    weights = np.array([1, 0, 2, 1], dtype=np.float32)
    assert [draw(weights, share) for share in (0, 0.2499, 0.25, 0.7499, 0.75, LAST)] == [0, 0, 2, 2, 3, 3]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(sum), mass=st.integers(1, 400))
@example(counts=[1] * 2500, mass=2048)
@example(counts=[1] * 2500, mass=2049)
def test_reach_counts_equality_and_ends_at_the_last_step(counts: list[int], mass: int) -> None:
    running = np.cumsum(counts)
    target = min(mass, running[-1])
    assert find_crossing(np.array(counts, dtype=np.float32), mass, "reach") == next(
        i for i, value in enumerate(running) if value >= target
    )
