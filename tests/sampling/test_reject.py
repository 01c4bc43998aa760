"""Rejection sampling gives the target's distribution, whatever the drafts were drawn from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.engine.plan import Draft
from penstock.sampling.rare.chain import find_shares
from penstock.sampling.reject import can_reject, draw_draft, verify_by_rejection
from penstock.sampling.row import RowState
from penstock.types import Request, SamplingParams

VOCAB, NUM_DRAWS = 7, 4_000


def make_row(seed: int, **sampling: Any) -> RowState:
    params = SamplingParams(**{"temperature": 1.0, **sampling})
    return RowState(Request(id="r", tokens=(1, 2), max_tokens=9, seed=seed, sampling=params), 0, [1, 2], 2)


def logits(seed: int, spread: float = 1.5) -> np.ndarray:
    """Logits of two places: after the last known token, and after a draft token."""
    return (spread * np.random.default_rng(seed).standard_normal((2, VOCAB))).astype(np.float32)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_k": 4, "presence_penalty": 1.0}])
def test_the_distribution_is_the_targets(sampling: dict[str, Any]) -> None:
    """Of the first token, and of the second where the first was accepted: within 4 deviations of the exact one."""
    target, drafting = logits(1), logits(2)
    firsts, seconds = np.zeros(VOCAB), np.zeros((VOCAB, VOCAB))
    for seed in range(NUM_DRAWS):
        row = make_row(seed, **sampling)
        drawn_from = find_shares(drafting[0], row)
        token = draw_draft(drawn_from, row)
        sampled = verify_by_rejection(target, row, [Draft(token, -1)], [drawn_from])
        firsts[sampled[0].token] += 1
        if len(sampled) > 1:
            seconds[token, sampled[1].token] += 1
        assert row.tokens == [1, 2]
    row = make_row(0, **sampling)
    check(firsts, find_shares(target[0], row))
    for token in range(VOCAB):
        row.append(token)
        if seconds[token].sum() > 100:
            check(seconds[token], find_shares(target[1], row))
        row.truncate(2)
    assert seconds.sum(axis=1).max() > 100


def check(counts: np.ndarray, shares: np.ndarray) -> None:
    total = counts.sum()
    deviation = np.sqrt(total * shares * (1 - shares)) + 1e-9
    assert (np.abs(counts - total * shares) <= 4 * deviation + 1e-6).all(), (counts / total, shares)


def test_equal_distributions_accept_everything() -> None:
    both = logits(3)
    for seed in range(200):
        row = make_row(seed)
        drawn_from = find_shares(both[0], row)
        token = draw_draft(drawn_from, row)
        assert [one.token for one in verify_by_rejection(both, row, [Draft(token, -1)], [drawn_from])][0] == token


def test_a_stop_token_ends_the_line() -> None:
    request = Request(id="r", tokens=(1, 2), max_tokens=9, eos_token_ids=(5,), sampling=SamplingParams(temperature=1.0))
    row = RowState(request, 0, [1, 2], 2)
    sure = np.full((2, VOCAB), -np.inf, dtype=np.float32)
    sure[:, 5] = 0.0
    assert [one.token for one in verify_by_rejection(sure, row, [Draft(5, -1)], [find_shares(sure[0], row)])] == [5]


def test_rows_that_are_compared_instead() -> None:
    assert can_reject(make_row(1)) and not can_reject(make_row(1, temperature=0.0))
    assert not can_reject(make_row(1, mirostat=2))
