"""Causal attention over a paged cache of latents: one vector per position is the key and the value of every head."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.attention.attention import Work
from penstock.ops.attention.tree_attention import Tail
from penstock.ops.registry import op


def _find_places(position: int, begin: int, nodes: Tensor) -> Tensor:
    """Return where positions 0 … `position` of a query lie: below `begin` in line, then along its path."""
    places = torch.arange(position + 1)
    if position >= begin:
        places[begin:] = begin + nodes[: position + 1 - begin]
    return places


@op(tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3})
def latent_attention(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    table: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    scale: float,
    tail: Tail | None = None,
    work: Work | None = None,
) -> Tensor:
    """q[T, H, R] and q_rope[T, H, W - R] over latents [N, P, W] → [T, H, R].

    Both parts of a query are multiplied with the whole latent, and the weights with its first R numbers. Queries,
    `table` and positions are as in `attention`; with a tail, queries see paths as in `tree_attention`.
    """
    out = torch.empty_like(q)
    size, rank = cache.shape[1], q.shape[2]
    starts = query_start.tolist()
    for s, length in enumerate(lengths.tolist()):
        for t in range(starts[s], starts[s + 1]):
            position = length - (starts[s + 1] - t) if tail is None else int(tail.positions[t])
            places = torch.arange(position + 1)
            if tail is not None:
                places = _find_places(position, int(tail.begins[s]), tail.nodes[t])
            latents = cache[table[s].long()[places // size], places % size].float()
            scores = torch.cat([q[t], q_rope[t]], dim=-1).float() @ latents.T * scale
            out[t] = (scores.softmax(-1) @ latents[:, :rank]).to(q.dtype)
    return out
