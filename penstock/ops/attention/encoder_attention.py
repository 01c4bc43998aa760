"""Bidirectional attention within each sequence of a packed batch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from penstock.ops.attention.attention import Work
from penstock.ops.registry import op


@op(tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3})
def encoder_attention(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, scale: float, work: Work | None = None
) -> Tensor:
    """q, k, v [T, H, D] → [T, H, D]; a token sees all of its sequence query_start[s]:query_start[s+1]."""
    out = torch.empty_like(q)
    starts = query_start.tolist()
    for begin, end in pairwise(starts):
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), k[begin:end].float()) * scale
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[begin:end].float()).to(q.dtype)
    return out
