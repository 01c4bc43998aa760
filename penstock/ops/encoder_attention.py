"""Bidirectional attention within each sequence of a packed batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from penstock.ops.attention import Work
from penstock.ops.example import normal
from penstock.ops.registry import Example, op
from penstock.ops.rows import EachSequence


def _examples() -> Iterator[Example]:
    cases = [([], 2, 8), ([1], 12, 32), ([5, 0, 70, 13], 3, 20), ([130, 64, 1], 2, 64)]
    for seed, (counts, num_heads, size) in enumerate(cases):
        q, k, v = (normal(10 * seed + i, sum(counts), num_heads, size) for i in range(3))
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        yield {"q": q, "k": k, "v": v, "query_start": starts, "scale": size**-0.5}


@op(tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}, examples=_examples, rows=EachSequence())
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
