"""Weights that make a model repeat a cycle of tokens, every other weight still read and multiplied.

The rows of the cycle's tokens in the embedding are so large that layers hardly turn them, and the head's row of each
next token points where its predecessor's does.
"""

from __future__ import annotations

from typing import Any

import torch

LENGTH = 64  # tokens of the cycle, the vocabulary's first
EMBEDDED = 100.0  # each value of a token's row: many times what all layers add to it
ALIGNED = 1.0  # each value of the row of the head: its logit is the width, far over all others


def repeat_cycle(model: Any, seed: int = 0) -> None:
    """Set the rows of a loaded model, in place: captured steps read them where they are."""
    if model.spec.vocab_size < LENGTH or model.head.rows is model.embedding.tokens:
        raise ValueError(f"a cycle needs {LENGTH} tokens and a head of its own")
    signs = torch.randint(0, 2, (LENGTH, model.spec.width), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0
    with torch.inference_mode():
        _write_rows(model.embedding.tokens, EMBEDDED * signs)
        _write_rows(model.head.rows, ALIGNED * signs.roll(1, 0))


def next_tokens(token: int, count: int) -> list[int]:
    """The tokens of the cycle after one of it."""
    return [(token + 1 + i) % LENGTH for i in range(count)]


def _write_rows(scheme: Any, rows: torch.Tensor) -> None:
    """Write a matrix's first rows: stored as rows on a GPU, as panels of 16 on a CPU."""
    if hasattr(scheme, "weight"):
        scheme.weight[: len(rows)] = rows.to(scheme.weight)
        return
    count, width, lanes = len(rows) // scheme.panels.shape[2], rows.shape[1], scheme.panels.shape[2]
    scheme.panels[:count] = rows.reshape(count, lanes, width).transpose(1, 2).to(scheme.panels)
