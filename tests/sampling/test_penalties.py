"""Penalties against vLLM's formulas, written out token by token."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.sampling import RowState
from penstock.sampling.penalties import TokenCounts

V = 24
TEXT = st.lists(st.integers(0, V - 1), max_size=30)


def _naive(
    logits: np.ndarray, prompt: list[int], generated: list[int], repetition: float, frequency: float, presence: float
) -> list[float]:
    result = []
    for token, value in enumerate(logits.tolist()):
        if token in prompt or token in generated:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * generated.count(token)
        value -= presence * (token in generated)
        result.append(value)
    return result


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    prompt=TEXT,
    generated=TEXT,
    repetition=st.sampled_from([0.5, 1.0, 1.3, 3.0]),
    frequency=st.sampled_from([-2.0, 0.0, 0.7]),
    presence=st.sampled_from([-1.5, 0.0, 2.0]),
    seed=st.integers(0, 99),
)
def test_against_the_formulas(
    make_row: Callable[..., RowState],
    prompt: list[int],
    generated: list[int],
    repetition: float,
    frequency: float,
    presence: float,
    seed: int,
) -> None:
    """Breaks when frequency or presence count the prompt, or repetition leaves it out."""
    logits = (np.random.default_rng(seed).normal(size=V) * 5).astype(np.float32)
    row = make_row(
        prompt=prompt,
        generated=generated,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    expected = _naive(logits, prompt, generated, repetition, frequency, presence)
    assert np.allclose(row.edit(logits.copy()), expected, rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(prompt=TEXT, moves=st.lists(st.one_of(st.integers(0, V - 1), st.just(None)), max_size=200))
def test_a_row_that_grew_and_shrank_equals_a_fresh_one(
    make_row: Callable[..., RowState], prompt: list[int], moves: list[int | None]
) -> None:
    """A resumed row is fresh, a row with rejected drafts has shrunk: both must edit alike, bit for bit."""
    sampling = {"repetition_penalty": 1.7, "frequency_penalty": 0.3, "presence_penalty": 0.9}
    row = make_row(prompt=prompt, **sampling)
    for token in moves:
        if token is not None:
            row.append(token)
        elif row.num_generated:
            row.truncate(len(row.tokens) - 1)
    fresh = make_row(prompt=prompt, generated=row.tokens[len(prompt) :], **sampling)
    logits = np.linspace(-3, 3, V, dtype=np.float32)
    assert row.tokens == fresh.tokens
    assert row.edit(logits).tobytes() == fresh.edit(logits).tobytes()


def test_counts_follow_a_long_text() -> None:
    text = np.random.default_rng(0).integers(0, 500, 3000).tolist()
    counts = TokenCounts(text[:10])
    for token in text[10:]:
        counts.add(token)
    for token in reversed(text[2500:]):
        counts.remove(token)
    ids, numbers = counts.below(400)
    assert dict(zip(ids.tolist(), numbers.tolist())) == {
        token: text[:2500].count(token) for token in set(text[:2500]) if token < 400
    }


@pytest.mark.parametrize("repetition", [1e-300, 1e-40, 1e40, 1e300])
def test_stay_finite_and_leave_the_impossible_impossible(make_row: Callable[..., RowState], repetition: float) -> None:
    logits = np.array([0.0, 5, -5, -math.inf, 1e30, -1e30, 0.25], dtype=np.float32)
    row = make_row(prompt=[0, 1, 2, 3, 4, 5], generated=[3], repetition_penalty=repetition, presence_penalty=-2.0)
    edited = row.edit(logits)
    assert edited[3] == -math.inf
    assert np.isfinite(np.delete(edited, 3)).all()
    assert edited[6] == 0.25


def test_ids_past_the_vocabulary_are_passed_over(make_row: Callable[..., RowState]) -> None:
    row = make_row(prompt=[1, 9], generated=[2, 50], repetition_penalty=2.0, presence_penalty=1.0)
    assert row.edit(np.ones(3, dtype=np.float32)).tolist() == [1.0, 0.5, -0.5]


def test_neutral_values_leave_the_very_array(make_row: Callable[..., RowState]) -> None:
    logits = np.ones(9, dtype=np.float32)
    assert make_row(generated=[4]).edit(logits) is logits


def test_edits_never_touch_the_raw_logits(make_row: Callable[..., RowState]) -> None:
    """Breaks when a row is edited in place: the raw log probabilities and the neighbours' tensor would change."""
    logits = np.ones(9, dtype=np.float32)
    make_row(repetition_penalty=2.0, logit_bias={4: 5.0}, allowed_token_ids=[1, 2]).edit(logits)
    assert (logits == 1).all()


def test_truncate_keeps_the_prompt(make_row: Callable[..., RowState]) -> None:
    row = make_row(prompt=[1, 2, 3], generated=[4])
    for length in (2, 5):
        with pytest.raises(ValueError, match="cannot truncate"):
            row.truncate(length)
    row.truncate(3)
    assert row.tokens == [1, 2, 3]
