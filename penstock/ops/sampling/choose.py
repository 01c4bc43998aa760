"""Reductions of logits that sampling needs, without sorting."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import op

SUM_BLOCK = 1024  # values under one sum


@op(tolerance={torch.float32: 0.0})
def argmax(x: Tensor) -> Tensor:
    """Return the first index of the largest value of each row of x[S, V] → [S] int32; NaN is larger than any number."""
    return torch.argmax(x, dim=-1).to(torch.int32)


@op(tolerance={torch.float32: 0.0})
def above(x: Tensor, least: Tensor, room: int) -> Tensor:
    """Count the values of each row of x[S, V] that are at least least[S], and list the first `room` of their indices,
    ascending, with -1 after the last → [S, 1 + room] int32."""
    out = torch.full((x.shape[0], 1 + room), -1, dtype=torch.int32)
    for row, values in enumerate(x >= least[:, None]):
        places = values.nonzero()[:, 0]
        out[row, 0] = len(places)
        out[row, 1 : 1 + len(places)] = places[:room]
    return out


@op(tolerance={torch.float32: 1e-5})
def weight_sums(x: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """Sum exp((x - top[S]) / temperature[S]) over each 1,024 values of the rows of x[S, V]."""
    weights = torch.exp((x.float() - top[:, None]) / temperature[:, None])
    parts = [part.sum(dim=-1, dtype=torch.float64) for part in torch.split(weights, SUM_BLOCK, dim=-1)]
    return torch.stack(parts, dim=-1).float()
