"""Sampling with row_params on the device against its reference, and the reference against the host's."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton")

import penstock.ops.triton.bodies  # noqa: E402, F401  registers the bodies
from penstock import SamplingParams  # noqa: E402
from penstock.ops.sampling import row_params as w  # noqa: E402
from penstock.ops.sampling.sample import BAD, NOTHING, sample  # noqa: E402
from penstock.sampling.filters import apply_filters  # noqa: E402
from tests.ops.examples import normal  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
NEUTRAL: dict[str, Any] = {}
FILTERS: list[dict[str, float]] = [
    NEUTRAL,
    {"k": 1},
    {"k": 5},
    {"k": 300},
    {"k": 10**6},
    {"p": 0.5},
    {"p": 0.97},
    {"p": 1e-9},
    {"p": 0.99},
    {"m": 0.02},
    {"m": 0.9},
    {"k": 50, "p": 0.8},
    {"k": 7, "m": 0.05},
    {"p": 0.6, "m": 0.01},
    {"k": 40, "p": 0.9, "m": 0.1},
]


def asked(size: int, filters: list[dict[str, float]]) -> w.RowParams:
    row_params = w.make_row_params(len(filters) + 1, size, DEVICE)
    for row, one in enumerate(filters):
        for name, column in (
            ("k", w.TOP_K),
            ("p", w.TOP_P),
            ("m", w.MIN_P),
            ("r", w.REPETITION),
            ("f", w.FREQUENCY),
            ("q", w.PRESENCE),
        ):
            if name in one:
                row_params.numbers[row, column] = one[name]
    return row_params


def drawn(logits: torch.Tensor, row_params: w.RowParams, heat: float | torch.Tensor, seed: int = 1) -> tuple[Any, Any]:
    """The tokens of each row by the body and by the reference."""
    count = len(logits)
    rows = torch.arange(count, device=DEVICE, dtype=torch.int32)
    temperature = torch.full((len(row_params.numbers),), heat) if isinstance(heat, float) else heat
    keys = torch.arange(len(row_params.numbers)) * 0x9E3779B97F4A7C1 + seed
    last = torch.zeros(len(row_params.numbers), dtype=torch.int64)
    given = [value.to(DEVICE) for value in (logits, temperature, keys, torch.arange(count) + 3)]
    theirs = w.RowParams(*(getattr(row_params, name).cpu().clone() for name in w.NAMES))
    reference: Any = sample.reference
    expected = reference(*(value.cpu() for value in given), rows.cpu(), last.clone(), theirs)
    found = sample.bodies["cuda"].function(*given, rows, last.to(DEVICE), row_params)
    assert torch.equal(row_params.counts.cpu(), theirs.counts)
    return found.tolist(), expected.tolist()


@pytest.mark.parametrize(
    ("size", "scale", "ties", "seed"),
    [
        (40, 2.0, True, 2),
        (4500, 0.01, False, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((40, 2.0, False, 1), (5000, 3.0, False, 1), (9000, 2.0, True, 1), (20_000, 4.0, True, 2))
        ),
    ],
)
def test_filters(size: int, scale: float, ties: bool, seed: int) -> None:
    """Peaked and flat rows, with many equals, over one piece and several."""
    logits = normal(seed, 1, size, scale=scale).expand(len(FILTERS), size).contiguous()
    if ties:
        logits = logits.bfloat16().float()
    found, expected = drawn(logits, asked(size, FILTERS), 0.8, seed)
    assert found == expected


@pytest.mark.parametrize("one", FILTERS)
def test_the_reference_keeps_what_the_host_keeps(one: dict[str, float]) -> None:
    logits = normal(5, 1, 3000, scale=2.0).bfloat16().float()
    row_params = asked(3000, [one])
    rows = torch.zeros(1, dtype=torch.int64)
    left = w.filter_logits(
        logits, torch.tensor([0.7]), w.RowParams(*(getattr(row_params, name).cpu() for name in w.NAMES)), rows
    )
    params = SamplingParams(
        temperature=0.7, top_k=int(one.get("k", 0)), top_p=one.get("p", 1.0), min_p=one.get("m", 0.0)
    )
    values = logits[0].numpy()
    ids, weights = apply_filters(values, float(values.max()), params)
    expected = np.arange(3000) if ids is None else ids
    assert torch.isfinite(left[0]).nonzero()[:, 0].tolist() == expected[weights > 0].tolist()


def test_a_neutral_row_gets_what_it_gets_without_parameters() -> None:
    logits = normal(3, 6, 9000, scale=2.0)
    found, _ = drawn(logits, asked(9000, [NEUTRAL, {"k": 3}, NEUTRAL, {"p": 0.5}, NEUTRAL, {"m": 0.5}]), 1.1)
    rows = torch.arange(6, device=DEVICE, dtype=torch.int32)
    keys = torch.arange(7) * 0x9E3779B97F4A7C1 + 1
    plain = sample.bodies["cuda"].function(
        logits.to(DEVICE), torch.full((7,), 1.1, device=DEVICE), keys.to(DEVICE), (torch.arange(6) + 3).to(DEVICE), rows
    )
    assert [found[i] for i in (0, 2, 4)] == [plain.tolist()[i] for i in (0, 2, 4)]


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_penalties_biases_and_masks(heat: float) -> None:
    size = 5000
    logits = normal(7, 1, size, scale=2.0).expand(6, size).contiguous()
    order = logits[0].argsort(descending=True)
    row_params = asked(size, [{"r": 1.5}, {"f": 0.7, "q": 0.2}, {"r": 0.5, "f": -3.0}, NEUTRAL, {"k": 4}, NEUTRAL])
    row_params.counts[0, order[:3].to(DEVICE)] = 1  # in the prompt
    row_params.counts[1, order[:2].to(DEVICE)] = 7  # generated three times
    row_params.counts[2, order[:40].to(DEVICE)] = 2
    row_params.biased[3, :20] = torch.arange(20, dtype=torch.int32, device=DEVICE) * 200
    row_params.bias[3, :20] = torch.linspace(-5, 30, 20, device=DEVICE)
    row_params.numbers[3, w.NUM_BIASED] = 20
    allowed = order[10:20].tolist()
    for row in (4, 5):
        row_params.numbers[row, w.MASKED] = 1
        for token in allowed:
            word = int(row_params.words[row, token // 32]) & 0xFFFFFFFF | 1 << token % 32
            row_params.words[row, token // 32] = word - (1 << 32) if word >> 31 else word
    for _ in range(4):
        found, expected = drawn(logits, row_params, heat)
        assert found == expected
    assert set(found[4:]) <= set(allowed)
    if heat == 0:
        assert found[3] == 3800 and found[4] == found[5] == order[10]


def test_nothing_and_no_numbers() -> None:
    size = 5000
    logits = normal(7, 5, size)
    row_params = asked(size, [{"k": 4}, NEUTRAL, {"p": 0.5}, {"k": 2}, NEUTRAL])
    logits[1, 4500], logits[2, 3], logits[3] = torch.nan, torch.inf, -torch.inf
    row_params.numbers[0, w.MASKED] = row_params.numbers[1, w.MASKED] = 1
    found, expected = drawn(logits, row_params, 1.0)
    assert found == expected and found[:4] == [NOTHING, BAD, BAD, BAD] and found[4] >= 0


@pytest.mark.parametrize("heat", [1e-30, pytest.param(1e38, marks=pytest.mark.slow)])
def test_extreme_temperatures(heat: float) -> None:
    logits = normal(8, 4, 6000, scale=3.0)
    row_params = asked(6000, [{"p": 0.9}, {"k": 9}, {"m": 0.3}, {"k": 9, "p": 0.5}])
    found, expected = drawn(logits, row_params, heat)
    assert found == expected


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_zeros_of_both_signs_are_equal(seed: int) -> None:
    """Of equal logits the lowest ids are kept, also where the bound is a zero."""
    logits = torch.full((4, 6000), -3.0)
    logits[:, 7:5000:3] = 0.0
    logits[:, 7:5000:6] = -0.0
    logits[1:3, 4000] = 2.0
    found, expected = drawn(logits, asked(6000, [{"k": 5}, {"k": 9}, {"p": 0.3}, {"k": 40, "p": 0.5}]), 3.0, seed)
    assert found == expected


def test_the_least_top_p_keeps_one() -> None:
    """What float32 makes a zero of."""
    logits = normal(4, 2, 5000)
    found, expected = drawn(logits, asked(5000, [{"p": 0.0}, {"k": 5, "p": 0.0}]), 2.0)
    assert found == expected == logits.argmax(-1).tolist()


def test_a_bias_past_the_end_names_nothing() -> None:
    logits = normal(4, 1, 5000)
    row_params = asked(5000, [NEUTRAL])
    row_params.biased[0, :2] = torch.tensor([5000, 17], dtype=torch.int32)
    row_params.bias[0, :2] = 50.0
    row_params.numbers[0, w.NUM_BIASED] = 2
    assert drawn(logits, row_params, 0.0) == ([17], [17])
