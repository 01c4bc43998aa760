from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.sampling import NO_TOKEN, RowState, Sampled, Sampler
from penstock.types import BeamSearchParams

Make = Callable[..., RowState]

LOGITS = [1.2, -0.3, 2.0, 2.0, 0.1, -math.inf, -4.0, 1.9, 0.8, -1.5]

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 4, "logprobs": 0},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "typical_p": 0.6},
    {"temperature": 0.9, "repetition_penalty": 1.4, "frequency_penalty": 0.2, "generated": [7, 7, 8]},
    {"temperature": 1.0, "allowed_token_ids": [0, 4, 8], "logprobs": 2},
    {"temperature": 1.0, "min_tokens": 2, "eos": [2], "bad_words": [[3]], "logit_bias": {1: 2.0}},
    {"beam": BeamSearchParams(beam_width=2, max_tokens=3)},
]


def _softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    weights = [math.exp((value - max(logits)) / temperature) for value in logits]
    return [weight / sum(weights) for weight in weights]


def _keep(logits: list[float], kept: set[int]) -> list[float]:
    return [value if token in kept else -math.inf for token, value in enumerate(logits)]


def _plus(logits: list[float], changes: dict[int, float]) -> list[float]:
    return [value + changes.get(token, 0.0) for token, value in enumerate(logits)]


# For each request the distribution it must follow, worked out by hand from LOGITS.
DISTRIBUTIONS: list[tuple[dict[str, Any], list[float]]] = [
    ({}, _softmax(LOGITS)),
    ({"temperature": 0.5}, _softmax(LOGITS, 0.5)),
    ({"temperature": 5.0}, _softmax(LOGITS, 5.0)),
    ({"top_k": 3}, _softmax(_keep(LOGITS, {2, 3, 7}))),
    ({"top_p": 0.5}, _softmax(_keep(LOGITS, {2, 3}))),  # 0.25 and 0.25, then 0.22 passes 0.5
    ({"top_p": 0.72}, _softmax(_keep(LOGITS, {2, 3, 7}))),
    ({"min_p": 0.4}, _softmax(_keep(LOGITS, {0, 2, 3, 7}))),  # exp(-0.8) = 0.449, exp(-1.2) = 0.301
    # Of the 4 that top_k leaves, the first 3 are 0.815; of all tokens they would be 0.61.
    ({"top_k": 4, "top_p": 0.8, "temperature": 2.0}, _softmax(_keep(LOGITS, {2, 3, 7}), 2.0)),
    ({"logit_bias": {6: 5.0, 2: -3.0}}, _softmax(_plus(LOGITS, {6: 5.0, 2: -3.0}))),
    ({"prompt": [2, 1], "repetition_penalty": 2.0}, _softmax(_plus(LOGITS, {2: -1.0, 1: -0.3}))),
    ({"generated": [7, 7], "frequency_penalty": 0.5, "presence_penalty": 0.25}, _softmax(_plus(LOGITS, {7: -1.25}))),
    ({"allowed_token_ids": [1, 4, 5]}, _softmax(_keep(LOGITS, {1, 4}))),
    ({"bad_words": [[2], [3]], "min_tokens": 1, "eos": [7]}, _softmax(_keep(LOGITS, {0, 1, 4, 6, 8, 9}))),
]


@pytest.mark.parametrize(("request_", "probabilities"), DISTRIBUTIONS)
def test_draws_follow_the_exact_distribution(
    make_row: Make, request_: dict[str, Any], probabilities: list[float]
) -> None:
    """Pearson's chi-square over 4,000 seeds; 99.99 % of samples of 9 degrees of freedom are below 33.7."""
    logits = torch.tensor([LOGITS])
    counts = [0] * len(LOGITS)
    for seed in range(4000):
        counts[Sampler().sample(logits, [make_row(seed=seed, **request_)])[0].token] += 1
    assert all(count == 0 for count, probability in zip(counts, probabilities) if probability == 0)
    expected = [4000 * probability for probability in probabilities]
    assert sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected) if mean) < 33.7


@pytest.mark.parametrize("vary", ["seed", "sibling", "position"])
def test_draws_over_a_wide_vocabulary(make_row: Make, vary: str) -> None:
    """5,000 tokens in 40 cells of neighbours, over each source of randomness alone (39 degrees of freedom: 83)."""
    values = np.random.default_rng(1).normal(size=5000).astype(np.float32)
    probabilities = np.exp(values.astype(np.float64))
    cells = (probabilities / probabilities.sum()).reshape(40, 125).sum(axis=1)
    logits, counts = torch.from_numpy(values)[None], np.zeros(40)
    for i in range(3000):
        row = make_row(**({"prompt": [1] * (i + 1)} if vary == "position" else {vary: i}))
        counts[Sampler().sample(logits, [row])[0].token // 125] += 1
    assert ((counts - 3000 * cells) ** 2 / (3000 * cells)).sum() < 83


def _batch(make_row: Make, vocabulary: int) -> tuple[torch.Tensor, list[RowState]]:
    rows = [make_row(seed=seed, sibling=seed % 3, **setting) for seed in range(3) for setting in SETTINGS]
    return torch.from_numpy(np.random.default_rng(2).normal(size=(len(rows), vocabulary)).astype(np.float32) * 3), rows


@pytest.mark.parametrize("vocabulary", [9, 1001, 4099])
def test_a_row_is_the_same_in_any_company(make_row: Make, vocabulary: int) -> None:
    """Tokens and log probabilities bit for bit: alone, among 33, in reverse. An odd vocabulary misaligns the rows."""
    logits, rows = _batch(make_row, vocabulary)
    together = Sampler().sample(logits, rows)
    assert Sampler().sample(logits.flip(0), rows[::-1]) == together[::-1]
    for i, row in enumerate(rows):
        assert Sampler().sample(logits[i : i + 1].clone(), [row]) == [together[i]]
        assert Sampler().sample(logits[i : i + 3], rows[i : i + 3]) == together[i : i + 3]


def test_weights_do_not_depend_on_where_a_row_lies() -> None:
    """The one elementwise function that rounds: breaks when exp treats the ends of an unaligned array differently."""
    values = np.random.default_rng(4).normal(size=1037).astype(np.float32)
    space = np.zeros(1100, dtype=np.float32)
    for offset in range(20):
        space[offset : offset + 1037] = values
        assert np.exp(space[offset : offset + 1037]).tobytes() == np.exp(values).tobytes()
        assert np.exp(values[offset:]).tobytes() == np.exp(values)[offset:].tobytes()


def test_sampling_changes_neither_logits_nor_rows(make_row: Make) -> None:
    logits, rows = _batch(make_row, 50)
    before, tokens = logits.clone(), [list(row.tokens) for row in rows]
    first = Sampler().sample(logits, rows)
    assert torch.equal(logits, before) and [row.tokens for row in rows] == tokens
    assert Sampler().sample(logits, rows) == first


def test_sibling_0_is_the_answer_of_n_1_and_others_differ(make_row: Make) -> None:
    logits = torch.zeros(1, 1000)
    alone = [Sampler().sample(logits, [make_row(seed=seed)])[0].token for seed in range(50)]
    siblings = [
        [Sampler().sample(logits, [make_row(seed=seed, n=4, sibling=sibling)])[0].token for seed in range(50)]
        for sibling in range(4)
    ]
    assert siblings[0] == alone
    assert all(sum(a == b for a, b in zip(siblings[i], siblings[j])) < 5 for i in range(4) for j in range(i))


def test_the_counter_is_the_absolute_position(make_row: Make) -> None:
    """A resumed row draws what the running one would; where the prompt ends does not matter."""
    logits = torch.zeros(1, 1000)
    rows = [make_row(prompt=[1] * p, generated=[2] * (9 - p)) for p in range(1, 9)]
    tokens = [Sampler().sample(logits, [row])[0].token for row in rows]
    assert len(set(tokens)) == 1
    assert Sampler().sample(logits, [make_row(prompt=[1] * 10)])[0].token != tokens[0]


def test_greedy_takes_the_lowest_id_of_equals(make_row: Make) -> None:
    logits = torch.zeros(2, 70)
    logits[0, [9, 33, 69]] = 4.0
    rows = [make_row(temperature=0), make_row(temperature=0, logprobs=1)]
    assert [sampled.token for sampled in Sampler().sample(logits, rows)] == [9, 0]


@pytest.mark.parametrize("temperature", [1e-300, 1e-6])
def test_the_coldest_draw_is_the_greedy_one(make_row: Make, temperature: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(5).normal(size=(40, 500)).astype(np.float32) * 10)
    cold = [make_row(temperature=temperature, top_p=0.9, logprobs=1, seed=seed) for seed in range(40)]
    greedy = [make_row(temperature=0, logprobs=1) for _ in range(40)]
    assert Sampler().sample(logits, cold) == Sampler().sample(logits, greedy)


def test_the_hottest_draw_is_even(make_row: Make) -> None:
    logits = torch.tensor([[5.0, -5.0, 0.0, -math.inf, 3.0]])
    tokens = [Sampler().sample(logits, [make_row(temperature=1e3, seed=seed)])[0].token for seed in range(2000)]
    counts = [tokens.count(token) for token in range(5)]
    assert counts[3] == 0 and all(440 < counts[token] < 560 for token in (0, 1, 2, 4))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("damage", "cause"), [("nan", "NaN"), ("inf", "+inf"), ("-inf", "-inf")])
def test_damaged_logits_fail_their_row_only(make_row: Make, setting: dict[str, Any], damage: str, cause: str) -> None:
    logits, rows = _batch(make_row, 60)
    sound = Sampler().sample(logits, rows)
    logits[4] = -math.inf if damage == "-inf" else logits[4]
    logits[4, 59] = float(damage)
    rows[4] = make_row(**setting)
    sampled = Sampler().sample(logits, rows)
    assert sampled[4].token == NO_TOKEN and cause in (sampled[4].error or "")
    assert sampled[4] == Sampled(NO_TOKEN, error=sampled[4].error)
    assert sampled[:4] + sampled[5:] == sound[:4] + sound[5:]
    assert all(one.error is None for one in sound)


def test_damage_under_a_mask_is_still_damage(make_row: Make) -> None:
    logits = torch.zeros(1, 20)
    logits[0, 7] = math.nan
    assert "NaN" in (Sampler().sample(logits, [make_row(allowed_token_ids=[1])])[0].error or "")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_that_leave_nothing_say_so(make_row: Make, temperature: float) -> None:
    logits = torch.zeros(3, 20)
    logits[1, 5] = -math.inf
    rows = [
        make_row(temperature=temperature, allowed_token_ids=[5, 6], bad_words=[[5], [6]], min_tokens=3, eos=[1]),
        make_row(temperature=temperature, allowed_token_ids=[5, 30]),
        make_row(temperature=temperature),
    ]
    sampled = Sampler().sample(logits, rows)
    assert sampled[0].error == (
        "allowed_token_ids (2), bad_words (2) and min_tokens (3) leave no token to sample: allow more tokens"
    )
    assert sampled[1].error is not None and sampled[1].token == NO_TOKEN
    assert sampled[2].error is None


def test_half_precision_and_strided_logits(make_row: Make) -> None:
    logits = (torch.arange(80.0) % 7).reshape(2, 40)
    rows = [make_row(top_p=0.9, logprobs=2), make_row(temperature=0)]
    expected = Sampler().sample(logits, rows)
    assert Sampler().sample(logits.bfloat16(), rows) == expected
    assert Sampler().sample(logits.t().contiguous().t(), rows) == expected


def test_no_rows_and_wrong_counts(make_row: Make) -> None:
    assert Sampler().sample(torch.zeros(0, 9), []) == []
    with pytest.raises(ValueError):
        Sampler().sample(torch.zeros(2, 9), [make_row()])
