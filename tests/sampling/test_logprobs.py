from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.sampling import RowState, Sampler, UnusableLogits
from penstock.sampling.row import Chooser
from penstock.types import MAX_LOGPROBS, BeamSearchParams, TokenLogprobs

V = 300


def _logits(seed: int, rows: int = 1, levels: int | None = None) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(size=(rows, V)) * 3
    if levels:
        values = np.round(values * levels) / levels
    values[:, ::50] = -np.inf
    return torch.from_numpy(values.astype(np.float32))


def _check(report: TokenLogprobs, logits: torch.Tensor, token: int, num: int) -> None:
    """Against a float64 softmax and a full sort."""
    expected = torch.log_softmax(logits.double(), dim=-1)
    order = sorted(range(V), key=lambda other: (-float(logits[other]), other))
    assert list(report) == [token] + [other for other in order[:num] if other != token]
    for other, entry in report.items():
        assert math.isclose(entry.logprob, float(expected[other]), abs_tol=1e-5)
        assert entry.rank == order.index(other) + 1


@pytest.mark.parametrize("levels", [None, 1])
@pytest.mark.parametrize("num", [0, 1, 5, MAX_LOGPROBS])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_chosen_token_then_the_likeliest(
    make_row: Callable[..., RowState], num: int, levels: int | None, temperature: float
) -> None:
    for seed in range(8):
        logits = _logits(seed, levels=levels)
        sampled = Sampler().sample(logits, [make_row(logprobs=num, temperature=temperature, seed=seed)])[0]
        assert sampled.logprobs is not None
        _check(sampled.logprobs, logits[0], sampled.token, num)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.5},
        {"top_k": 2},
        {"top_p": 0.2},
        {"logit_bias": {9: 50.0}},
        {"allowed_token_ids": [9, 11]},
        {"repetition_penalty": 5.0, "prompt": list(range(V))},
        {"bad_words": [[7]]},
        {"presence_penalty": 2.0, "generated": [5]},
    ],
)
def test_the_raw_distribution_whatever_the_request_changes(make_row: Callable[..., RowState], change: Any) -> None:
    """Breaks when log probabilities are taken after penalties, masks, temperature or filters."""
    logits = _logits(1)
    sampled = Sampler().sample(logits, [make_row(logprobs=5, **change)])[0]
    assert sampled.logprobs is not None
    _check(sampled.logprobs, logits[0], sampled.token, 5)


def test_none_when_not_asked(make_row: Callable[..., RowState]) -> None:
    assert Sampler().sample(_logits(1), [make_row()])[0].logprobs is None


def test_best_of_reports_the_chosen_token(make_row: Callable[..., RowState]) -> None:
    """The siblings to keep are chosen by their log probabilities."""
    sampled = Sampler().sample(_logits(1), [make_row(n=2, best_of=3)])[0]
    assert sampled.logprobs is not None and list(sampled.logprobs) == [sampled.token]
    assert Sampler().sample(_logits(1), [make_row(n=3)])[0].logprobs is None


@pytest.mark.parametrize("num", [0, 4])
def test_prompt_logprobs(num: int) -> None:
    logits = _logits(3, rows=6, levels=2)
    targets = [0, 299, 17, 50, 3, 3]
    report = Sampler().prompt_logprobs(logits, targets, num)
    assert len(report) == 6
    for values, target, entry in zip(logits, targets, report):
        _check(entry, values, target, num)
    assert report[0][0].logprob == -math.inf  # id 0 is impossible in these logits


def test_prompt_logprobs_are_the_same_alone() -> None:
    logits = _logits(3, rows=9)
    together = Sampler().prompt_logprobs(logits, list(range(9)), 3)
    assert together == [Sampler().prompt_logprobs(logits[i : i + 1], [i], 3)[0] for i in range(9)]


def test_prompt_logprobs_name_damage() -> None:
    logits = _logits(3, rows=2)
    logits[1, 5] = math.nan
    with pytest.raises(UnusableLogits, match="NaN"):
        Sampler().prompt_logprobs(logits, [1, 2], 0)


@pytest.mark.parametrize("width", [1, 3, 8])
def test_beam_candidates_are_the_likeliest(make_row: Callable[..., RowState], width: int) -> None:
    logits = _logits(5, levels=1)
    beam = BeamSearchParams(beam_width=width, max_tokens=4)
    sampled = Sampler().sample(logits, [make_row(beam=beam)])[0]
    order = sorted(range(V), key=lambda other: (-float(logits[0, other]), other))
    expected = torch.log_softmax(logits[0].double(), dim=-1)
    assert [token for token, _ in sampled.candidates] == order[: 2 * width]
    assert np.allclose([value for _, value in sampled.candidates], expected[order[: 2 * width]], atol=1e-5)
    assert sampled.token == order[0]


def test_beams_never_get_an_impossible_candidate(make_row: Callable[..., RowState]) -> None:
    logits = torch.full((1, 40), -math.inf)
    logits[0, [7, 30]] = torch.tensor([1.0, 1.0])
    sampled = Sampler().sample(logits, [make_row(beam=BeamSearchParams(beam_width=4, max_tokens=4))])[0]
    assert [token for token, _ in sampled.candidates] == [7, 30]


SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 4, "min_p": 0.01},
    {"temperature": 1.0, "top_p": 0.5, "logit_bias": {9: 50.0}},
    {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 2.0},
    {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.01},
]


@pytest.mark.parametrize("sampling", SAMPLERS)
def test_what_the_samplers_leave(make_row: Callable[..., RowState], sampling: dict[str, Any]) -> None:
    """Their shares are those that tokens are drawn with; breaks if they are the model's own."""
    logits, counts, shares = _logits(3), np.zeros(V), np.zeros(V)
    num_draws = 600
    for seed in range(num_draws):
        row = make_row(logprobs=MAX_LOGPROBS, post_sampling_probs=True, seed=seed, **sampling)
        sampled = Sampler().sample(logits, [row])[0]
        assert sampled.logprobs is not None and next(iter(sampled.logprobs)) == sampled.token
        counts[sampled.token] += 1
        shares[:] = 0
        for token, entry in sampled.logprobs.items():
            shares[token] = math.exp(entry.logprob)
        ranked = sorted(sampled.logprobs.values(), key=lambda entry: entry.rank or 0)
        assert [entry.logprob for entry in ranked] == sorted((entry.logprob for entry in ranked), reverse=True)
    assert (counts[shares == 0] == 0).all() or len(sampled.logprobs or ()) >= MAX_LOGPROBS
    spread = 5 * np.sqrt(num_draws * shares * (1 - shares)) + 1
    assert (np.abs(counts - num_draws * shares)[shares > 0] <= spread[shares > 0]).all()
    if len(sampled.logprobs or ()) < MAX_LOGPROBS:
        assert math.isclose(shares.sum(), 1.0, abs_tol=1e-6)


def test_a_token_that_cannot_be_drawn_has_no_share(make_row: Callable[..., RowState]) -> None:
    row = make_row(logprobs=V - 1 if V - 1 < MAX_LOGPROBS else MAX_LOGPROBS, post_sampling_probs=True, top_k=2)
    sampled = Sampler().sample(_logits(1), [row])[0]
    assert sampled.logprobs is not None and len(sampled.logprobs) == 2


def test_such_rows_are_sampled_by_the_host(make_row: Callable[..., RowState]) -> None:
    assert make_row(logprobs=1, post_sampling_probs=True).chooser is Chooser.HOST
    assert make_row(post_sampling_probs=True).chooser is not Chooser.HOST
