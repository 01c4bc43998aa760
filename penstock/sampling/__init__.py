"""Logits → tokens.

In: logits [M, V] of a step and the state of the rows they belong to. Out: for each row a token, and where asked its log
probabilities, or the reason why this row alone has none. Sampling knows nothing of models, caches, blocks or
tokenizers; what ids spell it is told once, as a `Lexicon`.
"""

from __future__ import annotations

from penstock.sampling.likeliest import UnusableLogits
from penstock.sampling.row import RowState
from penstock.sampling.sampler import NO_TOKEN, Sampled, Sampler

__all__ = ["NO_TOKEN", "RowState", "Sampled", "Sampler", "UnusableLogits"]
