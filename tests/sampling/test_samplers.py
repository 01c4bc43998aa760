"""top_n_sigma, XTC, dynamic temperature, mirostat and repeat_last_n against plain definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidRequest
from penstock.sampling import RowState, Sampler
from penstock.sampling.rare.chain import _filter_by_mirostat, apply_chain
from penstock.sampling.rare.stateful import next_mu, num_kept
from penstock.sampling.row import Chooser
from penstock.types import SamplingParams

Make = Callable[..., RowState]
V = 400
LOGITS = (np.random.default_rng(3).normal(size=V) * 3).astype(np.float32)
LOGITS[[7, 90]] = -np.inf


def _probabilities(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return np.asarray(weights / weights.sum())


def _distribution(row: RowState, logits: np.ndarray = LOGITS) -> np.ndarray:
    """Of the row's draw."""
    top, mu = float(logits.max()), row.samplers.mu
    ids, weights = apply_chain(logits, top, row) if mu is None else _filter_by_mirostat(logits, top, row, mu)
    out = np.zeros(len(logits))
    out[np.arange(len(logits)) if ids is None else ids] = weights / weights.sum(dtype=np.float64)
    return out


@pytest.mark.parametrize("n", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_top_n_sigma(make_row: Make, n: float, temperature: float) -> None:
    possible = LOGITS[np.isfinite(LOGITS)].astype(np.float64)
    deviation = math.sqrt(((possible - possible.mean()) ** 2).mean())
    least = LOGITS.max() - n * deviation
    kept = np.where(least > LOGITS, -np.inf, LOGITS)
    got = _distribution(make_row(top_n_sigma=n, temperature=temperature))
    assert np.allclose(got, _probabilities(kept, temperature), atol=1e-6) and 0 < (got > 0).sum() < V


@pytest.mark.parametrize(
    ("threshold", "temperature", "more"),
    [(0.1, 1.0, {}), (0.02, 1.5, {"top_k": 12}), (0.05, 0.7, {"min_p": 0.001}), (0.0, 1.0, {})],
)
def test_xtc(make_row: Make, threshold: float, temperature: float, more: dict[str, Any]) -> None:
    """All tokens of the threshold's probability or more go, but for the least likely of them."""
    before = _distribution(make_row(temperature=temperature, xtc_probability=1e-300, **more))
    likely = [token for token in np.argsort(-before, kind="stable") if before[token] >= threshold and before[token] > 0]
    after = before.copy()
    after[likely[:-1]] = 0
    got = _distribution(make_row(temperature=temperature, xtc_probability=1.0, xtc_threshold=threshold, **more))
    assert np.allclose(got, after / after.sum(), atol=1e-5) and len(likely) > 1


def test_xtc_happens_as_often_as_asked(make_row: Make) -> None:
    """Decided by the request's seed and the place alone, and by another number than the token's own draw."""
    likeliest = int(LOGITS.argmax())
    rows = [make_row(xtc_probability=0.3, seed=seed) for seed in range(1500)]
    spared = [_distribution(row)[likeliest] > 0 for row in rows]
    assert 0.66 < np.mean(spared) < 0.74
    assert spared == [_distribution(row)[likeliest] > 0 for row in rows]
    tokens = [Sampler().sample(torch.from_numpy(LOGITS)[None], [row])[0].token for row in rows]
    expected = 0.7 * _probabilities(LOGITS)[likeliest]
    assert abs(np.mean([token == likeliest for token in tokens]) - expected) < 0.04


@pytest.mark.parametrize(("exponent", "more"), [(1.0, {}), (2.5, {"top_k": 9}), (0.5, {"top_p": 0.8}), (0.0, {})])
def test_dynamic_temperature(make_row: Make, exponent: float, more: dict[str, Any]) -> None:
    """The filters see a temperature of 1; the entropy of what they leave sets the one that is drawn with."""
    left = _distribution(make_row(**more)) if more else _probabilities(LOGITS)
    kept = left[left > 0]
    entropy = -(kept * np.log(kept)).sum() / math.log(len(kept))
    heat = 0.3 + 1.4 * entropy**exponent
    expected = _probabilities(np.where(left > 0, LOGITS, -np.inf), heat)
    got = _distribution(make_row(temperature=1.0, dynatemp_range=0.7, dynatemp_exponent=exponent, **more))
    assert np.allclose(got, expected, atol=1e-5)


def test_a_dynamic_temperature_of_0_takes_the_likeliest(make_row: Make) -> None:
    sure = np.full(V, -80.0, dtype=np.float32)
    sure[33] = 80
    assert _distribution(make_row(temperature=0.5, dynatemp_range=3.0), sure)[33] == 1


@pytest.mark.parametrize("mu", [-1.0, 0.5, 3.0, 9.0, 40.0])
def test_mirostat_2(make_row: Make, mu: float) -> None:
    probabilities = _probabilities(LOGITS, 0.8)
    with np.errstate(divide="ignore"):
        kept = (-np.log2(probabilities) <= mu) | (probabilities == probabilities.max())
    expected = np.where(kept, probabilities, 0)
    got = _distribution(make_row(mirostat=2, temperature=0.8, mu=mu))
    assert np.allclose(got, expected / expected.sum(), atol=1e-6)


@pytest.mark.parametrize("mu", [0.5, 3.0, 9.0])
def test_mirostat_1(make_row: Make, mu: float) -> None:
    probabilities = _probabilities(LOGITS, 0.8)
    order = np.argsort(-probabilities, kind="stable")
    first = probabilities[order[:100]]
    steps = [math.log((i + 2) / (i + 1)) for i in range(99)]
    falls = [math.log(first[i] / first[i + 1]) for i in range(99)]
    s = sum(t * b for t, b in zip(steps, falls)) / sum(t * t for t in steps)
    k = int((((s - 1) * 2**mu) / (1 - V ** (1 - s))) ** (1 / s))
    expected = np.zeros(V)
    expected[order[: max(k, 1)]] = probabilities[order[: max(k, 1)]]
    got = _distribution(make_row(mirostat=1, temperature=0.8, mu=mu))
    assert np.allclose(got, expected / expected.sum(), atol=1e-6)


@pytest.mark.parametrize("values", [[1.0], [2.0] * 100, [0.0, -math.inf], list(np.linspace(50, -50, 100))])
def test_mirostat_1_of_odd_distributions(values: list[float]) -> None:
    """Breaks when an exponent of 0 or 1 divides by 0."""
    for mu in (-1e6, 0.0, 5.0, 1e6):
        assert 1 <= num_kept(values, 1.0, mu, 1000) <= 1000


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_learns_from_each_token(make_row: Make, version: int) -> None:
    """mu begins at 2 * tau; after many tokens the surprise is tau in the mean."""
    flat = torch.from_numpy((np.random.default_rng(5).normal(size=5000)).astype(np.float32))[None]
    row = make_row(mirostat=version, mirostat_tau=4.0, max_tokens=1000)
    assert row.samplers.mu == 8.0
    surprises = []
    for _ in range(300):
        mu = row.samplers.mu
        assert mu is not None
        sampled = Sampler().sample(flat, [row])[0]
        assert row.samplers.mu == mu  # sampling changes no row
        assert sampled.mu is not None
        row.append(sampled.token, sampled.mu)
        surprises.append((mu - sampled.mu) / 0.1 + 4.0)
    assert abs(np.mean(surprises[100:]) - 4.0) < 0.3
    resumed = make_row(mirostat=version, mirostat_tau=4.0, generated=row.tokens[3:], mu=row.samplers.mu)
    assert Sampler().sample(flat, [resumed]) == Sampler().sample(flat, [row])
    row.truncate(len(row.tokens) - 299)
    assert row.samplers.mu == pytest.approx(8.0 - 0.1 * (surprises[0] - 4.0))


def test_mu_after_a_token() -> None:
    assert next_mu(8.0, 2**-6, 5.0, 0.1) == pytest.approx(7.9)


def test_the_likeliest_token_whatever_else_is_asked(make_row: Make) -> None:
    for asked in ({"xtc_probability": 1.0, "xtc_threshold": 0.0}, {"mirostat": 2}, {"dynatemp_range": 0.5}):
        row = make_row(temperature=0.0, **asked)
        assert Sampler().sample(torch.from_numpy(LOGITS)[None], [row])[0].token == int(LOGITS.argmax())


def _naive_penalties(logits: np.ndarray, prompt: list[int], generated: list[int], n: int) -> list[float]:
    text = prompt + generated
    start = len(text) if n == 0 else max(0, len(text) - n)
    new = [token for place, token in enumerate(text) if place >= max(start, len(prompt))]
    result = []
    for token, value in enumerate(logits.tolist()):
        if token in text[start:]:
            value = value / 1.7 if value > 0 else value * 1.7
        result.append(value - 0.3 * new.count(token) - 0.9 * (token in new))
    return result


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    prompt=st.lists(st.integers(0, 8), max_size=12),
    n=st.integers(0, 9),
    moves=st.lists(st.one_of(st.integers(0, 8), st.just(None)), max_size=40),
)
def test_penalties_look_back_so_far(make_row: Make, prompt: list[int], n: int, moves: list[int | None]) -> None:
    row = make_row(prompt=prompt, repetition_penalty=1.7, frequency_penalty=0.3, presence_penalty=0.9, repeat_last_n=n)
    for token in moves:
        if token is not None:
            row.append(token)
        elif row.num_generated:
            row.truncate(len(row.tokens) - 1)
    logits = np.linspace(-3, 3, 9, dtype=np.float32)
    expected = _naive_penalties(logits, prompt, row.tokens[len(prompt) :], n)
    assert np.allclose(row.edit(logits), expected, rtol=1e-5, atol=1e-5)


def test_who_chooses_on_a_gpu(make_row: Make) -> None:
    """The device all of it, but windows that its counts cannot follow."""
    for asked in (
        {"mirostat": 1},
        {"xtc_probability": 0.5},
        {"top_n_sigma": 1.0},
        {"dynatemp_range": 0.5},
        {"dry_multiplier": 1.0, "temperature": 0.0},
        {"repetition_penalty": 1.1, "repeat_last_n": 64},
    ):
        assert make_row(**asked).chooser is Chooser.DEVICE_EXTRAS, asked
    for asked in (
        {},
        {"top_p": 0.5},
        {"mirostat": 2, "temperature": 0.0},
        {"repeat_last_n": 64},
        {"repetition_penalty": 1.1, "repeat_last_n": 0},
    ):
        assert make_row(**asked).chooser < Chooser.DEVICE_EXTRAS, asked
    assert make_row(repetition_penalty=1.1, repeat_last_n=16_384).chooser is Chooser.HOST


@pytest.mark.parametrize(
    "values",
    [
        {"mirostat": 3},
        {"mirostat_tau": -1},
        {"mirostat_eta": 2},
        {"xtc_probability": 2},
        {"xtc_threshold": -0.1},
        {"top_n_sigma": math.nan},
        {"dynatemp_range": -1},
        {"dynatemp_exponent": "1"},
        {"repeat_last_n": -2},
        {"repeat_last_n": True},
    ],
)
def test_values_out_of_range(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(values))):
        SamplingParams(**values)
