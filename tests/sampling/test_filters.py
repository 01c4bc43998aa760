"""Each filter against its definition, written out naively in float64 over a full sort."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.sampling.filters import apply_filters, apply_temperature, min_p, top_p, typical_p
from penstock.types import SamplingParams

SLACK = 1e-5  # float32 weights against float64 probabilities

LOGITS = st.lists(
    st.one_of(st.integers(-24, 24).map(lambda step: step / 2), st.just(-math.inf)), min_size=1, max_size=60
).filter(lambda values: max(values) > -math.inf)
TEMPERATURES = st.sampled_from([1e-6, 0.3, 1.0, 2.5, 1e3])


def _probabilities(logits: list[float], temperature: float) -> list[float]:
    top = max(logits)
    weights = [math.exp((value - top) / temperature) for value in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _weights(logits: list[float], temperature: float) -> np.ndarray:
    return apply_temperature(np.array(logits, dtype=np.float32), max(logits), temperature)


def _descending(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


def _find_nucleus(probabilities: list[float], mass: float) -> list[int]:
    kept, total = [], 0.0
    for token in _descending(probabilities):
        if total >= mass:
            break
        kept.append(token)
        total += probabilities[token]
    return kept


def _share(probabilities: list[float], kept: list[int]) -> list[float]:
    total = math.fsum(probabilities[token] for token in kept)
    return [probability / total if token in kept else 0.0 for token, probability in enumerate(probabilities)]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(logits=LOGITS, temperature=TEMPERATURES)
def test_temperature_gives_the_softmax(logits: list[float], temperature: float) -> None:
    weights = _weights(logits, temperature)
    assert np.isfinite(weights).all()
    assert np.allclose(weights / weights.sum(dtype=np.float64), _probabilities(logits, temperature), atol=SLACK)
    assert all(weights[i] == 0 for i, value in enumerate(logits) if value == -math.inf)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-6, 1e3, 1e39, 1e300])
def test_weights_stay_finite_at_any_temperature(temperature: float) -> None:
    """Breaks when the temperature is rounded to 0 or infinity in float32 (0/0, inf/inf)."""
    weights = _weights([3e38, 1.0, 0.0, -3e38, -math.inf], temperature)
    assert weights[0] == 1 and weights[4] == 0 and np.isfinite(weights).all()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(logits=LOGITS, share=st.floats(0.001, 1), temperature=TEMPERATURES)
def test_min_p_keeps_what_is_likely_enough(logits: list[float], share: float, temperature: float) -> None:
    probabilities = _probabilities(logits, temperature)
    ratios = [probability / max(probabilities) for probability in probabilities]
    assume(all(abs(ratio - share) > 1e-6 or ratio == 1 for ratio in ratios))
    kept = min_p(_weights(logits, temperature), share).tolist()
    assert kept == [token for token, ratio in enumerate(ratios) if ratio >= share]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(logits=LOGITS, mass=st.floats(0.001, 0.999), temperature=TEMPERATURES)
def test_top_p_keeps_the_smallest_nucleus(logits: list[float], mass: float, temperature: float) -> None:
    probabilities = _probabilities(logits, temperature)
    kept = top_p(_weights(logits, temperature), mass).tolist()
    assert kept == sorted(_descending(logits)[: len(kept)])  # on ties the lower ids
    assert len(_find_nucleus(probabilities, mass - SLACK)) <= len(kept)
    assert len(kept) <= max(1, len(_find_nucleus(probabilities, mass + SLACK)))


@pytest.mark.parametrize(("mass", "num_kept"), [(0.24, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_top_p_at_exact_sums(mass: float, num_kept: int) -> None:
    """Four equal tokens; breaks when the comparison at the edge of the nucleus changes between < and <=."""
    weights = np.array([0, 1, 1, 0, 1, 1], dtype=np.float32)
    assert top_p(weights, mass).tolist() == [1, 2, 4, 5][:num_kept]


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("mass", [0.1, 0.5, 0.9, 0.999, 1 - 1e-12])
def test_top_p_on_a_real_vocabulary(scale: float, mass: float) -> None:
    """Flat and peaked: breaks when the short cut for peaked distributions drops part of the nucleus."""
    logits = (np.random.default_rng(3).normal(size=20_000) * scale).astype(np.float32)
    weights = apply_temperature(logits, float(logits.max()), 1.0)
    kept = top_p(weights, mass)
    order = np.lexsort((np.arange(len(logits)), -weights))
    running = np.cumsum(weights[order].astype(np.float64))
    assert set(kept.tolist()) == set(order[: len(kept)].tolist())
    assert running[len(kept) - 1] >= mass * running[-1] * (1 - 1e-12)
    assert len(kept) == 1 or running[len(kept) - 2] < mass * running[-1] * (1 + 1e-12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(logits=LOGITS, mass=st.floats(0.001, 0.999), temperature=st.sampled_from([0.3, 1.0, 2.5, 1e3]))
def test_typical_p_keeps_what_is_nearest_the_entropy(logits: list[float], mass: float, temperature: float) -> None:
    probabilities = _probabilities(logits, temperature)
    entropy = math.fsum(-p * math.log(p) for p in probabilities if p)
    distance = [abs(-math.log(p) - entropy) if p else math.inf for p in probabilities]
    kept = typical_p(_weights(logits, temperature), mass).tolist()
    dropped = [token for token in range(len(logits)) if token not in kept]
    farthest = max(distance[token] for token in kept)
    assert all(distance[token] >= farthest - SLACK for token in dropped)
    total = math.fsum(probabilities[token] for token in kept)
    last = min(probabilities[token] for token in kept if distance[token] >= farthest - SLACK)
    assert total >= mass - SLACK and total - last <= mass + SLACK
    for token in dropped:  # on ties the lower ids
        assert all(other < token for other in kept if logits[other] == logits[token])


def test_typical_p_may_drop_the_likeliest() -> None:
    """One token of 0.3 and seventy of 0.01: the many are typical. Breaks when typical_p is computed as top_p."""
    weights = np.array([0.3] + [0.01] * 70, dtype=np.float32)
    assert 0 not in typical_p(weights, 0.5).tolist()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(logits=LOGITS, top_k=st.integers(-1, 70), top=st.floats(0.05, 1), low=st.sampled_from([0.0, 0.01, 0.2]))
def test_filters_together_in_order(logits: list[float], top_k: int, top: float, low: float) -> None:
    """min_p and top_k on the whole, top_p on what they leave; breaks when top_p sees the unfiltered mass."""
    probabilities = _probabilities(logits, 1.0)
    ratios = [probability / max(probabilities) for probability in probabilities]
    assume(all(abs(ratio - low) > 1e-6 for ratio in ratios))
    kept = [token for token in _descending(logits)[: top_k if top_k > 0 else None] if ratios[token] >= low]
    possible = {token for token in kept if logits[token] > -math.inf}
    sampling = SamplingParams(top_k=top_k, top_p=top, min_p=low)
    ids, weights = apply_filters(np.array(logits, dtype=np.float32), max(logits), sampling)
    found = [token for token, weight in zip(range(len(logits)) if ids is None else ids.tolist(), weights) if weight > 0]
    assert found == sorted(found)
    if top == 1:
        assert set(found) == possible
    else:
        left = _share(probabilities, kept)
        assert set(_find_nucleus(left, top - SLACK)) <= set(found) <= possible
        assert len(found) <= max(1, len(_find_nucleus(left, top + SLACK)))


@pytest.mark.parametrize("off", [{}, {"top_k": 0}, {"top_k": -1}, {"top_k": 5}, {"top_k": 99}, {"min_p": 0.0}])
def test_filters_that_are_off_keep_all(off: dict[str, Any]) -> None:
    logits = np.array([0.5, -1, 3, 2, 2], dtype=np.float32)
    ids, weights = apply_filters(logits, 3.0, SamplingParams(**off))
    assert ids is None and (weights > 0).all()


def test_top_k_keeps_exactly_k_on_ties() -> None:
    logits = np.array([1, 7, 7, 7, 7, 9], dtype=np.float32)
    ids, _ = apply_filters(logits, 9.0, SamplingParams(top_k=3))
    assert ids is not None and ids.tolist() == [1, 2, 5]


def test_typical_p_sees_what_top_k_left() -> None:
    """Over all 72 tokens the unlikely ones are typical, over the top 2 they are gone."""
    logits = np.log(np.array([0.3, 0.2] + [0.5 / 70] * 70)).astype(np.float32)
    sampling = SamplingParams(top_k=2, typical_p=0.01)
    ids, _ = apply_filters(logits, float(logits.max()), sampling)
    assert ids is not None and ids.tolist() == [0]
    ids, _ = apply_filters(logits, float(logits.max()), sampling.clone(top_k=0))
    assert ids is not None and ids.tolist() != [0]
