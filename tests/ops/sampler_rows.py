"""Rows that ask for DRY, top_n_sigma, XTC, dynamic temperature, mirostat and repeat_last_n, as a device has them."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import torch

from penstock.ops.sampling import extras as e
from penstock.ops.sampling import row_params as w
from penstock.sampling.row import RowState
from penstock.types import Request, SamplingParams

LENGTH = 60
DRY = {"dry_multiplier": 2.0, "dry_sequence_breakers": ()}
ASKED: list[dict[str, Any]] = [
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.4, "top_p": 0.9},
    {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    {"xtc_probability": 0.5, "xtc_threshold": 0.002, "top_k": 30},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"dynatemp_range": 0.7},
    {"dynatemp_range": 0.8, "dynatemp_exponent": 2.0, "top_k": 20, "xtc_probability": 0.9},
    {"dynatemp_range": 0.3, "min_p": 0.01, "dynatemp_exponent": 0.0},
    {"mirostat": 2},
    {"mirostat": 1},
    {"mirostat": 2, "mirostat_tau": 1.5, "repetition_penalty": 1.2},
    {"mirostat": 1, "mirostat_tau": 2.0},
    DRY,
    {**DRY, "dry_allowed_length": 1, "dry_penalty_last_n": 20, "temperature": 0.0},
    {"top_p": 0.8},
    {},
    {**DRY, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "repeat_last_n": 7, "top_n_sigma": 2.0},
    {"repetition_penalty": 1.5, "repeat_last_n": 40},
    {"frequency_penalty": 0.5, "repeat_last_n": 3},
]


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


def entered(states: list[RowState], size: int, device: str) -> tuple[w.RowParams, e.Extras]:
    from penstock.runner.cuda.rows import DeviceParams

    known = DeviceParams(len(states), size, 256, torch.device(device))
    known.admit(list(enumerate(states)))
    return known.tensors, known.extras


def drawn(states: list[RowState], logits: torch.Tensor, device: str, steps: int, body: Any) -> tuple[Any, ...]:
    """Tokens of some steps, and what is known of the rows afterwards."""
    row_params, extras = entered(states, logits.shape[-1], device)
    count = len(states)
    rows = torch.arange(count, device=device, dtype=torch.int32)
    temperature = torch.tensor([state.request.sampling.temperature for state in states] + [0.0], device=device)
    keys = (torch.arange(count + 1) * 0x9E3779B97F4A7C1 + 5).to(device)
    last = torch.zeros(count + 1, dtype=torch.int64, device=device)
    tokens = []
    for step in range(steps):
        places = torch.full((count,), LENGTH + step, dtype=torch.int32, device=device)
        tokens.append(body(logits[step].to(device), temperature, keys, places, rows, last, row_params, extras).tolist())
    return tokens, row_params.counts.cpu(), extras.history.cpu(), extras.numbers.cpu()[:, e.MU]
