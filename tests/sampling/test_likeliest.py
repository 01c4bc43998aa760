from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.sampling.logits import UnusableLogits
from penstock.sampling.topk import argmax, rank, rank_top_k, top_k_ids


def _order(values: np.ndarray) -> list[int]:
    return sorted(range(len(values)), key=lambda token: (-float(values[token]), token))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    length=st.sampled_from([1, 2, 63, 64, 65, 200, 1000]),
    count=st.integers(0, 1100),
    levels=st.integers(1, 400),
    seed=st.integers(0, 2**32),
)
def test_order_of_tokens_against_a_full_sort(length: int, count: int, levels: int, seed: int) -> None:
    """Few levels make many ties; breaks when ties at the cut are not taken by lowest id or the fold bounds too high."""
    random = np.random.default_rng(seed)
    values = random.integers(-levels, levels, length).astype(np.float32)
    values[random.random(length) < 0.2] = -np.inf
    order = _order(values)
    assert rank_top_k(values, count).tolist() == order[:count]
    assert top_k_ids(values, count).tolist() == sorted(order[:count])
    token = int(random.integers(length))
    assert rank(values, token) == order.index(token) + 1


@pytest.mark.parametrize("length", [1, 3, 8, 15, 16, 17, 63, 64, 65, 1000, 50257])
def test_of_equals_the_lowest_id(length: int) -> None:
    for at in {0, length // 2, length - 1}:
        values = np.full(length, -1, dtype=np.float32)
        values[at:] = 2.5
        assert argmax(values) == at


@pytest.mark.parametrize("at", [0, 40, 99])
@pytest.mark.parametrize(("value", "cause"), [(np.nan, "NaN"), (np.inf, "[+]inf")])
def test_damage_anywhere_is_named(at: int, value: float, cause: str) -> None:
    values = np.zeros(100, dtype=np.float32)
    values[at] = value
    with pytest.raises(UnusableLogits, match=cause):
        argmax(values)


def test_nothing_possible_is_named() -> None:
    with pytest.raises(UnusableLogits, match="all 9 logits are -inf"):
        argmax(np.full(9, -np.inf, dtype=np.float32))
