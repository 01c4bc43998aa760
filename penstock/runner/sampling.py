"""What sampling and pooling leave in a row's result."""

from __future__ import annotations

import torch

from penstock.config import LOGIT_ROWS
from penstock.engine.plan import Row, RowResult
from penstock.models.decoder import Decoder
from penstock.sampling.row import RowState
from penstock.sampling.sampler import Sampled, Sampler


def take(state: RowState, sampled: list[Sampled], result: RowResult) -> None:
    """Keep the row's new tokens; beams get theirs from the host."""
    failed = next((one for one in sampled if one.error), None)
    if failed is not None and not result.error:
        result.error, result.unfit = failed.error, failed.unfit
    if result.error:
        return
    if sampled[0].candidates:
        result.candidates = sampled[0].candidates
        return
    result.tokens = tuple(one.token for one in sampled)
    result.logprobs = tuple(one.logprobs for one in sampled if one.logprobs is not None)
    for one in sampled:
        state.append(one.token, one.mu)
    result.mu = sampled[-1].mu
    if state.guide is not None:
        result.error, result.unfit = state.failure, state.failure is not None
        result.complete = state.finished
        result.forced = any(one.forced for one in sampled) or state.finished and not state.guide.complete


def prompt_logprobs(
    model: Decoder, sampler: Sampler, row: Row, state: RowState, hidden: torch.Tensor, result: RowResult
) -> None:
    """From the hidden states [count, C] of a part of the prompt; raises UnusableLogits."""
    targets = state.tokens[row.start + 1 : min(row.start + row.count + 1, state.num_prompt)]
    num = state.request.sampling.prompt_logprobs or 0
    for first in range(0, len(targets), LOGIT_ROWS):
        part = targets[first : first + LOGIT_ROWS]
        logits = model.logits(hidden[first : first + len(part)])
        result.prompt_logprobs += tuple(sampler.prompt_logprobs(logits, part, num))


def embedding(values: torch.Tensor) -> RowResult:
    if not values.isfinite().all():
        return RowResult(error="the embedding contains NaN or infinity: the model's weights or arithmetic are damaged")
    return RowResult(embedding=tuple(values.tolist()))
