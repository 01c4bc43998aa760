"""DRY, top_n_sigma, XTC, dynamic temperature, mirostat and repeat_last_n on the device against their reference, and the
reference against the host's."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton")

import penstock.ops.triton.bodies  # noqa: E402, F401  registers the bodies
from penstock.ops.sampling import extras as e  # noqa: E402
from penstock.ops.sampling.sample import sample  # noqa: E402
from penstock.sampling.rare.stateful import StatefulSamplers  # noqa: E402
from penstock.sampling.row import Chooser  # noqa: E402
from tests.ops.examples import normal  # noqa: E402
from tests.ops.sampler_rows import ASKED, LENGTH, drawn, entered, rows_of  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture(autouse=True)
def _no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


@pytest.mark.parametrize(
    ("size", "scale", "seed", "steps"),
    [
        (5000, 3.0, 2, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((300, 2.0, 1, 6), (9000, 3.0, 2, 3), (20_000, 0.5, 3, 2))
        ),
    ],
)
def test_against_the_reference(size: int, scale: float, seed: int, steps: int) -> None:
    states = rows_of(size, seed, len(ASKED))
    if steps == 1:  # one of each kind
        states = [states[i] for i in (0, 3, 6, 9, 10, 13, 15, 16)]
    logits = normal(seed, steps, len(states), size, scale=scale)
    logits[:, 1, :100] = -torch.inf
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
    unasked = [i for i, state in enumerate(states) if state.chooser is not Chooser.DEVICE_EXTRAS]
    assert len(unasked) == 2 and [found[0][0][i] for i in unasked] == [plain[0][0][i] for i in unasked]


@pytest.mark.parametrize("index", range(len(ASKED)))
def test_the_reference_leaves_what_the_host_leaves(index: int) -> None:
    """Which tokens may be drawn, and their weights, at the first step."""
    from penstock.ops.sampling.sample import _apply_samplers as left_on_device
    from penstock.sampling.rare.chain import _filter_by_mirostat, apply_chain

    size = 2000
    state = rows_of(size, 5, len(ASKED))[index]
    row_params, extras = entered([state], size, "cpu")
    logits = normal(6, 1, size, scale=2.0)
    asked = state.request.sampling
    heat, zero = torch.tensor([asked.temperature]), torch.zeros(1, dtype=torch.int64)
    extras.numbers[0, e.XTC_PROBABILITY] = float(asked.has_xtc)
    object.__setattr__(asked, "xtc_probability", float(asked.has_xtc))
    x, hot = left_on_device(logits, heat, zero, zero + LENGTH, zero, row_params, extras)
    edited = state.edit(logits[0].numpy().copy())
    if asked.greedy:
        assert np.allclose(x[0].numpy(), edited, rtol=1e-5)
        return
    top, mu = float(edited.max()), state.samplers.mu
    ids, weights = apply_chain(edited, top, state) if mu is None else _filter_by_mirostat(edited, top, state, mu)
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
        state.samplers = StatefulSamplers(state.request, state.tokens, mu)
    _, fresh = entered(states, 300, "cpu")
    again = entered(states, 300, "cpu")[0]
    for i, state in enumerate(states):
        if state.has_penalties:
            assert torch.equal(counts[i], again.counts[i])
        if state.samplers.dry is not None or state.has_penalty_window:
            assert torch.equal(history[i, : LENGTH + 9], fresh.history[i, : LENGTH + 9])
        if state.samplers.mu is not None:
            assert float(fresh.numbers[i, e.MU]) == float(mus[i])
