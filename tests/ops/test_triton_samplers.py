"""DRY, top_n_sigma, XTC, dynamic temperature, mirostat and repeat_last_n on the device against their reference, and the
reference against the host's."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"      # before Triton is imported
pytest.importorskip("triton")

import penstock.ops.triton  # noqa: E402, F401  registers the bodies
from penstock.ops import extras as e  # noqa: E402
from penstock.ops import wishes as w  # noqa: E402
from penstock.ops.example import normal  # noqa: E402
from penstock.ops.sample import sample  # noqa: E402
from penstock.sampling.row import RowState  # noqa: E402
from penstock.sampling.samplers import Samplers  # noqa: E402
from penstock.types import Request, SamplingParams  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
LENGTH = 60
DRY = {"dry_multiplier": 2.0, "dry_sequence_breakers": ()}
ASKED: list[dict[str, Any]] = [
    {"top_n_sigma": 1.0}, {"top_n_sigma": 0.4, "top_p": 0.9}, {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    {"xtc_probability": 0.5, "xtc_threshold": 0.002, "top_k": 30}, {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"dynatemp_range": 0.7}, {"dynatemp_range": 0.8, "dynatemp_exponent": 2.0, "top_k": 20, "xtc_probability": 0.9},
    {"dynatemp_range": 0.3, "min_p": 0.01, "dynatemp_exponent": 0.0}, {"mirostat": 2}, {"mirostat": 1},
    {"mirostat": 2, "mirostat_tau": 1.5, "repetition_penalty": 1.2}, {"mirostat": 1, "mirostat_tau": 2.0},
    DRY, {**DRY, "dry_allowed_length": 1, "dry_penalty_last_n": 20, "temperature": 0.0}, {"top_p": 0.8}, {},
    {**DRY, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "repeat_last_n": 7, "top_n_sigma": 2.0},
    {"repetition_penalty": 1.5, "repeat_last_n": 40}, {"frequency_penalty": 0.5, "repeat_last_n": 3}]


def rows_of(size: int, seed: int, count: int) -> list[RowState]:
    """Rows with texts of few different tokens, so that much of them is repeated."""
    random = Random(seed)
    breakers = np.zeros(size, dtype=bool)
    breakers[::7] = True
    bits = np.packbits(breakers, bitorder="little").tobytes()
    made = []
    for asked in (ASKED * 2)[:count]:
        tokens = [random.choice((1, 2, 3, 7, size - 1)) for _ in range(LENGTH)]
        params = SamplingParams(**{"temperature": 0.9, **asked})
        request = Request(id="r", tokens=tuple(tokens[:40]), sampling=params, seed=seed, dry_breakers=bits)
        made.append(RowState(request, 0, tokens, 40))
    return made


def entered(states: list[RowState], size: int, device: str) -> tuple[w.Wishes, e.Extras]:
    from penstock.runner.cuda.wishes import WishRows

    known = WishRows(len(states), size, 256, torch.device(device))
    known.admit(list(enumerate(states)))
    return known.tensors, known.extras


def drawn(states: list[RowState], logits: torch.Tensor, device: str, steps: int, body: Any) -> tuple[Any, ...]:
    """Tokens of some steps, and what is known of the rows afterwards."""
    wishes, extras = entered(states, logits.shape[-1], device)
    count = len(states)
    rows = torch.arange(count, device=device, dtype=torch.int32)
    temperature = torch.tensor([state.request.sampling.temperature for state in states] + [0.0], device=device)
    keys = (torch.arange(count + 1) * 0x9E3779B97F4A7C1 + 5).to(device)
    last = torch.zeros(count + 1, dtype=torch.int64, device=device)
    tokens = []
    for step in range(steps):
        places = torch.full((count,), LENGTH + step, dtype=torch.int32, device=device)
        tokens.append(body(logits[step].to(device), temperature, keys, places, rows, last, wishes, extras).tolist())
    return tokens, wishes.counts.cpu(), extras.history.cpu(), extras.numbers.cpu()[:, e.MU]


@pytest.fixture(autouse=True)
def _no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


@pytest.mark.parametrize(("size", "scale", "seed", "steps"), [(5000, 3.0, 2, 1), *(
    pytest.param(*case, marks=pytest.mark.slow)
    for case in ((300, 2.0, 1, 6), (9000, 3.0, 2, 3), (20_000, 0.5, 3, 2)))])
def test_against_the_reference(size: int, scale: float, seed: int, steps: int) -> None:
    states = rows_of(size, seed, len(ASKED))
    logits = normal(seed, steps, len(states), size, scale=scale)
    logits[:, 3, :100] = -torch.inf
    found = drawn(states, logits, DEVICE, steps, sample.bodies["cuda"].function)
    expected = drawn(states, logits, "cpu", steps, sample.reference)
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1]) and torch.equal(found[2], expected[2])
    assert torch.allclose(found[3], expected[3], rtol=1e-4)


@pytest.mark.slow
def test_a_row_that_asks_nothing_gets_the_same_token_beside_others() -> None:
    states = rows_of(9000, 4, len(ASKED))
    logits = normal(4, 1, len(states), 9000, scale=2.0)
    found = drawn(states, logits, DEVICE, 1, sample.bodies["cuda"].function)
    plain = drawn(states, logits, DEVICE, 1, lambda *given: sample.bodies["cuda"].function(*given[:-1]))
    unasked = [i for i, state in enumerate(states) if not state.asks_extras]
    assert len(unasked) == 2 and [found[0][0][i] for i in unasked] == [plain[0][0][i] for i in unasked]


@pytest.mark.parametrize("index", range(len(ASKED)))
def test_the_reference_leaves_what_the_host_leaves(index: int) -> None:
    """Which tokens may be drawn, and their weights, at the first step."""
    from penstock.ops.sample import _left as left_on_device
    from penstock.sampling.choice import _left, _surprising

    size = 2000
    state = rows_of(size, 5, len(ASKED))[index]
    wishes, extras = entered([state], size, "cpu")
    logits = normal(6, 1, size, scale=2.0)
    asked = state.request.sampling
    heat, zero = torch.tensor([asked.temperature]), torch.zeros(1, dtype=torch.int64)
    extras.numbers[0, e.XTC_PROBABILITY] = float(asked.has_xtc)
    object.__setattr__(asked, "xtc_probability", float(asked.has_xtc))
    x, hot = left_on_device(logits, heat, zero, zero + LENGTH, zero, wishes, extras)
    edited = state.edit(logits[0].numpy().copy())
    if asked.greedy:
        assert np.allclose(x[0].numpy(), edited, rtol=1e-5)
        return
    top, mu = float(edited.max()), state.samplers.mu
    ids, weights = _left(edited, top, state) if mu is None else _surprising(edited, top, state, mu)
    expected = np.zeros(size)
    expected[np.arange(size) if ids is None else ids] = weights / weights.sum()
    assert np.allclose(torch.softmax(x[0].double() / hot[0], -1).numpy(), expected, rtol=2e-4, atol=1e-7)


@pytest.mark.slow
def test_the_row_after_some_steps_is_a_row_that_is_taken_in_then() -> None:
    """Counts, history and mu: breaks when a preempted row goes on with others than it had."""
    states = rows_of(300, 7, len(ASKED))
    logits = normal(8, 9, len(states), 300, scale=1.0)
    tokens, counts, history, mus = drawn(states, logits, DEVICE, 9, sample.bodies["cuda"].function)
    for i, state in enumerate(states):
        for step in tokens:
            state.append(step[i])
        mu = None if state.samplers.mu is None else float(mus[i])
        state.samplers = Samplers(state.request, state.tokens, mu)
    _, fresh = entered(states, 300, "cpu")
    again = entered(states, 300, "cpu")[0]
    for i, state in enumerate(states):
        if state.penal:
            assert torch.equal(counts[i], again.counts[i])
        if state.samplers.dry is not None or state.asks_window:
            assert torch.equal(history[i, :LENGTH + 9], fresh.history[i, :LENGTH + 9])
        if state.samplers.mu is not None:
            assert float(fresh.numbers[i, e.MU]) == float(mus[i])
