"""Answers written with noise in the model's place, through the rows and the sampler that the runner uses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.sampling import RowState, Sampler
from penstock.text.tokenizers.tokenizer import Tokenizer

SPREAD = 100_000
NOISE = np.random.default_rng(5).normal(size=SPREAD + 49_152).astype(np.float32) * 3


def noise(seed: int, position: int, size: int = 49_152) -> torch.Tensor:
    """[1, V]: logits that follow from where they are wanted."""
    at = int(np.random.default_rng([seed, position]).integers(SPREAD))
    return torch.from_numpy(np.resize(NOISE[at : at + 49_152], size))[None]


@dataclass
class Written:
    tokens: list[int]
    text: str
    reason: str  # stop, length, error
    num_forced: int
    error: str | None = None


def write(row: RowState, tokenizer: Tokenizer, seed: int = 0) -> Written:
    """To its end, as the engine would."""
    num_forced = 0
    while True:
        sampled = Sampler().sample(noise(seed, row.num_generated, tokenizer.vocab_size), [row])[0]
        if sampled.error is not None:
            return _written(row, tokenizer, "error", num_forced, sampled.error)
        row.append(sampled.token)
        num_forced += sampled.forced
        if row.is_finished or sampled.token in row.request.stop_token_ids:
            return _written(row, tokenizer, "stop", num_forced)
        if row.num_generated >= row.request.max_tokens:
            return _written(row, tokenizer, "length", num_forced)


def _written(row: RowState, tokenizer: Tokenizer, reason: str, num_forced: int, error: str | None = None) -> Written:
    tokens = row.tokens[row.num_prompt :]
    return Written(tokens, tokenizer.decode(tokens), reason, num_forced, error)
