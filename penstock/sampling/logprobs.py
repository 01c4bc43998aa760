"""Log probabilities of the model's raw distribution, before anything a request asks for changes it."""

from __future__ import annotations

import torch

from penstock.ops import log_softmax
from penstock.sampling.arrays import Array
from penstock.sampling.likeliest import rank, ranked
from penstock.types import Logprob, TokenLogprobs


def log_probabilities(logits: Array) -> Array:
    """Of one row [V]."""
    result: Array = log_softmax(torch.from_numpy(logits)[None])[0].numpy()
    return result


def token_logprobs(logits: Array, token: int, num: int) -> TokenLogprobs:
    """One token's log probability and rank, then those of the `num` likeliest."""
    values = log_probabilities(logits)
    report = {token: Logprob(float(values[token]), rank(logits, token))}
    for place, other in enumerate(ranked(logits, num).tolist(), start=1):
        report.setdefault(other, Logprob(float(values[other]), place))
    return report


def beam_candidates(logits: Array, beam_width: int) -> tuple[tuple[int, float], ...]:
    """The 2 * beam_width likeliest tokens, so that beam_width remain when as many end their answers."""
    values = log_probabilities(logits)
    ids = ranked(logits, 2 * beam_width)
    return tuple((int(token), float(values[token])) for token in ids if logits[token] > -torch.inf)
