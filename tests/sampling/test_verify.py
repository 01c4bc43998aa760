"""Speculation changes nothing: what `verify` keeps is what sampling one token at a time gives, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.plan import Draft
from penstock.sampling import NO_TOKEN, RowState, Sampled, Sampler

Make = Callable[..., RowState]

V = 16
LENGTH = 30
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 9, "seed": 3},
    {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    {
        "temperature": 1.2,
        "frequency_penalty": 1.0,
        "bad_words": [[4, 5], [6, 7, 8], [9]],
        "min_tokens": 12,
        "eos": [0, 1],
    },
]


def _model(tokens: list[int]) -> np.ndarray:
    """Logits after a text: a function of all of it."""
    return np.random.default_rng(tokens).normal(size=V).astype(np.float32) * 2


def _step_by_step(row: RowState, count: int) -> list[Sampled]:
    answer = []
    for _ in range(count):
        answer += Sampler().sample(torch.from_numpy(_model(row.tokens))[None], [row])
        row.append(answer[-1].token)
    return answer


def _path(draft: list[Draft], guess: int) -> list[int]:
    path: list[int] = []
    while guess >= 0:
        path.insert(0, draft[guess].token)
        guess = draft[guess].parent
    return path


def _logits(row: RowState, draft: list[Draft]) -> torch.Tensor:
    return torch.from_numpy(np.stack([_model(row.tokens + _path(draft, guess)) for guess in range(-1, len(draft))]))


def _line(truth: list[int], random: np.random.Generator) -> list[Draft]:
    """Right guesses as a rule; now and then a wrong one, with right ones after it that must not be kept."""
    return [
        Draft(token if random.random() < 0.8 else int(random.integers(V)), parent)
        for parent, token in enumerate(truth[: int(random.integers(0, 6))], start=-1)
    ]


def _tree(truth: list[int], random: np.random.Generator) -> list[Draft]:
    """At each depth some guesses under random parents of the depth before, the right one often among them."""
    draft: list[Draft] = []
    level = [-1]
    for token in truth[: int(random.integers(0, 4))]:
        parents, level = level, []
        for parent in parents:
            for guess in {int(random.integers(V)), int(random.integers(V)), token if random.random() < 0.8 else 0}:
                level.append(len(draft))
                draft.append(Draft(guess, parent))
    return draft


@pytest.mark.parametrize("guess", [_line, _tree])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_same_tokens_with_and_without_drafts(
    make_row: Make, setting: dict[str, Any], guess: Callable[[list[int], np.random.Generator], list[Draft]]
) -> None:
    """Breaks when a position's counter, penalties, bad words or min_tokens do not follow the accepted tokens."""
    truth = _step_by_step(make_row(**setting), LENGTH + 8)
    tokens = [sampled.token for sampled in truth]
    random = np.random.default_rng(6)
    row = make_row(**setting)
    answer: list[Sampled] = []
    num_drafted = num_accepted = 0
    while len(answer) < LENGTH:
        draft = guess(tokens[len(answer) :], random)
        before = list(row.tokens)
        sampled = Sampler().verify(_logits(row, draft), row, tuple(draft))
        assert row.tokens == before
        for one in sampled:
            row.append(one.token)
        answer += sampled
        num_drafted += len(draft)
        num_accepted += len(sampled) - 1
    assert answer == truth[: len(answer)]
    assert 5 <= num_accepted < num_drafted


def test_acceptance_ends_at_the_first_difference(make_row: Make) -> None:
    row = make_row(temperature=0)
    logits = torch.zeros(4, V)
    logits[0, 3] = logits[1, 4] = logits[2, 5] = logits[3, 6] = 9.0

    def verify(*tokens: int) -> list[int]:
        draft = tuple(Draft(token, parent) for parent, token in enumerate(tokens, start=-1))
        return [one.token for one in Sampler().verify(logits[: 1 + len(tokens)], row, draft)]

    assert verify() == [3]
    assert verify(3) == [3, 4]
    assert verify(3, 4, 5) == [3, 4, 5, 6]
    assert verify(3, 4, 9) == [3, 4, 5]
    assert verify(3, 9, 5) == [3, 4]
    assert verify(9, 4, 5) == [3]


def test_a_branch_is_followed_by_parent_not_by_place(make_row: Make) -> None:
    """Two branches guess the same second token; breaks when a guess under another parent is accepted."""
    logits = torch.zeros(5, V)
    logits[0, 2] = logits[1, 7] = logits[2, 8] = logits[3, 9] = logits[4, 10] = 5.0
    draft = (Draft(1, -1), Draft(2, -1), Draft(8, 0), Draft(8, 1))
    sampled = Sampler().verify(logits, make_row(temperature=0), draft)
    assert [one.token for one in sampled] == [2, 8, 10]


def test_an_error_ends_the_walk_and_leaves_the_row(make_row: Make) -> None:
    row = make_row(temperature=0, presence_penalty=1.0)
    logits = torch.zeros(3, V)
    logits[0, 3] = 9.0
    logits[1, 4] = math.nan
    sampled = Sampler().verify(logits, row, (Draft(3, -1), Draft(4, 0)))
    assert [one.token for one in sampled] == [3, NO_TOKEN]
    assert sampled[0].error is None and "NaN" in (sampled[1].error or "")
    assert row.tokens == [1, 2, 3]
