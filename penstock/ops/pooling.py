"""One row of each sequence's hidden states."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from penstock.ops.registry import op

MIN_NORM = 1e-12  # of a row's length


@op(tolerance={torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3})
def pooling(hidden: Tensor, query_start: Tensor, first: bool, normalize: bool) -> Tensor:
    """hidden[T, C] → [S, C] float32: of each sequence query_start[s]:query_start[s+1] the mean of its rows or the
    first of them, at length 1 if it is normalized. Each is summed on its own, in float64 here."""
    rows = []
    for begin, end in pairwise(query_start.tolist()):
        tokens = hidden[begin:end].double()
        row = tokens[0] if first else tokens.sum(0) / (end - begin)
        if normalize:
            row = row / row.square().sum().sqrt().clamp(min=MIN_NORM)
        rows.append(row.float())
    return torch.stack(rows) if rows else hidden.new_zeros((0, hidden.shape[1]), dtype=torch.float32)
