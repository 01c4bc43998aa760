"""Verification ends where the answer does, and an error after accepted tokens is the next step's."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.engine.plan import Draft, RowResult
from penstock.runner.rows import add_sampled
from penstock.sampling.row import RowState
from penstock.sampling.sampler import Sampler
from penstock.types import Request, SamplingParams


def logits(*likeliest: int) -> Any:
    values = np.zeros((len(likeliest), 10), dtype=np.float32)
    for place, token in enumerate(likeliest):
        values[place, token] = 5.0
    return values


def row(**sampling: Any) -> RowState:
    params = SamplingParams(temperature=0, **sampling)
    return RowState(Request(id="r", tokens=(1,), sampling=params, max_tokens=9, eos_token_ids=(5,)), 0, [1], 1)


def line(*tokens: int) -> tuple[Draft, ...]:
    return tuple(Draft(token, place - 1) for place, token in enumerate(tokens))


def test_nothing_is_verified_after_a_stop() -> None:
    def fail_after_5(output: list[int], values: Any) -> Any:
        assert 5 not in output
        return values

    state = row(logits_processors=[fail_after_5])
    sampled = Sampler().verify(logits(4, 5, 6, 7), state, line(4, 5, 6))
    assert [one.token for one in sampled] == [4, 5] and not any(one.error for one in sampled)
    early = Sampler().verify(logits(4, 5, 6, 7), row(ignore_eos=True), line(4, 5, 6))
    assert [one.token for one in early] == [4, 5, 6, 7]


def test_an_error_after_accepted_tokens_is_left_to_the_next_step() -> None:
    values = logits(4, 6, 7)
    values[1] = np.nan
    state, result = row(), RowResult()
    add_sampled(state, Sampler().verify(values, state, line(4, 6)), result)
    assert result.tokens == (4,) and result.error is None and state.tokens == [1, 4]
    result = RowResult()
    add_sampled(state, Sampler().verify(values[1:], state, line(6)), result)
    assert result.error is not None and not result.tokens and state.tokens == [1, 4]
