"""Sampling parameters of rows beyond the temperature, in tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

TOP_K, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE, NUM_BIASED, MASKED, NUM_LOGPROBS = range(9)
NUM_PARAMS = 16  # columns, some of no use yet
NEUTRAL = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # NUM_LOGPROBS counts from 1; 0 asks for none
MAX_BIASED = 512
MAX_LOGPROBS = 32
MAX_CANDIDATES = 4096  # tokens that the threshold search reads
LARGEST = torch.finfo(torch.float32).max
MAX_COUNTED = 32766  # in counts


@dataclass(frozen=True)
class RowParams:
    """Sampling parameters of R entries; each row of a step names its entry."""

    numbers: Tensor  # [R, NUM_PARAMS] float32
    counts: Tensor  # [R, V] int16: twice how often a token was generated, and 1 if the prompt has it
    words: Tensor  # [R, ceil(V / 32)] int32: a bit for each token that is allowed, where MASKED
    biased: Tensor  # [R, MAX_BIASED] int32: tokens
    bias: Tensor  # [R, MAX_BIASED] float32
    edited: Tensor  # [R, V] float32, of no meaning between calls
    candidates: Tensor  # [R, MAX_CANDIDATES] float32, likewise
    candidate_ids: Tensor  # [R, MAX_CANDIDATES] int32, likewise


NAMES = tuple(field.name for field in fields(RowParams))


def make_row_params(num_entries: int, vocab_size: int, device: torch.device | str = "cpu") -> RowParams:
    """Make entries with neutral parameters."""

    def zeros(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros((num_entries, width), dtype=dtype, device=device)

    numbers = zeros(NUM_PARAMS)
    numbers[:, : len(NEUTRAL)] = torch.tensor(NEUTRAL, device=device)
    return RowParams(
        numbers,
        zeros(vocab_size, torch.int16),
        zeros(-(-vocab_size // 32), torch.int32),
        zeros(MAX_BIASED, torch.int32),
        zeros(MAX_BIASED),
        zeros(vocab_size),
        zeros(MAX_CANDIDATES),
        zeros(MAX_CANDIDATES, torch.int32),
    )


def row_params_bytes(vocab_size: int) -> int:
    """Return the bytes of one entry."""
    return sum(getattr(made, name).nbytes for made in [make_row_params(1, vocab_size, "meta")] for name in NAMES)


def edit_logits(logits: Tensor, row_params: RowParams, rows: Tensor) -> Tensor:
    """Apply each row's biases, penalties and mask to logits[S, V]; return float32."""
    x = logits.float().clone()
    numbers = row_params.numbers[rows]
    for s, row in enumerate(rows.tolist()):
        ids, bias = (values[row, : int(numbers[s, NUM_BIASED])] for values in (row_params.biased, row_params.bias))
        x[s].index_add_(0, ids[ids < x.shape[1]].long(), bias[ids < x.shape[1]])
    counts = row_params.counts[rows].int()
    repetition = numbers[:, REPETITION, None]
    repeated = torch.where(x > 0, x / repetition, x * repetition)
    possible = x > -torch.inf
    x = torch.where((counts > 0) & (repetition != 1) & possible, repeated.clamp(-LARGEST, LARGEST), x)
    times = counts >> 1
    less = x - (numbers[:, FREQUENCY, None] * times + numbers[:, PRESENCE, None])
    touched = (times > 0) & ((numbers[:, FREQUENCY, None] != 0) | (numbers[:, PRESENCE, None] != 0)) & possible
    x = torch.where(touched, less.clamp(-LARGEST, LARGEST), x)
    token = torch.arange(x.shape[1], device=x.device)
    allowed = (row_params.words[rows][:, token // 32] >> (token % 32)) & 1
    return torch.where((allowed == 0) & (numbers[:, MASKED, None] > 0), -torch.inf, x)


def filter_logits(x: Tensor, temperature: Tensor, row_params: RowParams, rows: Tensor) -> Tensor:
    """Mask what a row's min_p, top_k and top_p leave out of x[S, V]; each sees what the one before left.

    Of equal logits those with the lowest ids come first. Rows of temperature 0 are left alone.
    """
    numbers = row_params.numbers[rows]
    temp = torch.where(temperature > 0, temperature, 1.0)[:, None]
    weights = torch.exp((x - x.amax(-1, keepdim=True)) / temp)
    ordered, order = x.sort(dim=-1, descending=True, stable=True)
    ordered_weights = weights.gather(-1, order)
    place = torch.arange(x.shape[1], device=x.device)
    top_k = numbers[:, TOP_K, None]
    stays = (ordered_weights >= numbers[:, MIN_P, None]) & ((place < top_k) | (top_k <= 0)) & (ordered > -torch.inf)
    left = torch.where(stays, ordered_weights, 0.0).double()
    needed = numbers[:, TOP_P, None].double() * left.sum(-1, keepdim=True)
    before = left.cumsum(-1) - left
    stays &= (before < needed) | (place == 0) | (numbers[:, TOP_P, None] >= 1)
    stays = torch.zeros_like(stays).scatter(-1, order, stays)
    return torch.where(stays | (temperature <= 0)[:, None], x, -torch.inf)


def count_tokens(row_params: RowParams, rows: Tensor, tokens: Tensor) -> None:
    """Add generated tokens to the counts of those of rows[n] that have penalties; no row twice."""
    numbers = row_params.numbers[rows]
    penal = (numbers[:, REPETITION] != 1) | (numbers[:, FREQUENCY] != 0) | (numbers[:, PRESENCE] != 0)
    index = rows[penal].long(), tokens[penal].long()
    row_params.counts[index] = (row_params.counts[index].int() + 2).clamp(max=MAX_COUNTED).to(torch.int16)
