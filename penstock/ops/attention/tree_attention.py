"""Causal attention over the paged cache for draft tokens that form trees."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.ops.attention.attention import attention, find_first
from penstock.ops.attention.cache import bits
from penstock.ops.registry import op


class Tail(NamedTuple):
    """Where a query of a tree finds its path.

    Positions below begins[s] of sequence s lie at places of the same number. Position begins[s] + i of query t lies at
    place begins[s] + nodes[t, i]. A sequence without a tree begins at its length.
    """

    begins: Tensor  # [S] int32
    positions: Tensor  # [T] int64, of the queries
    nodes: Tensor  # [T, W] int32; only positions[t] - begins[s] + 1 of a row are read

    def cut(self, num_tokens: int, num_sequences: int) -> Tail:
        """Take the first tokens and sequences without copying."""
        return Tail(self.begins[:num_sequences], self.positions[:num_tokens], self.nodes[:num_tokens])


def _take_scales(k_scale: Tensor, blocks: Tensor, places: Tensor, is_int4: bool) -> Tensor:
    """Return the scales of keys at `places` of `blocks`, each a block of one position."""
    if is_int4:
        return k_scale[blocks, :, :, :, places].unsqueeze(-1)
    return k_scale[blocks, :, places].unsqueeze(2)


@op(tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3})
def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    tail: Tail,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Like `attention`, but a query sees the path of its node as if the path were a line.

    lengths[s] counts places, all nodes included. The exact body gives a query the bits that `attention` gives it after
    its path was written as a line.
    """
    out = torch.empty_like(q)
    size, starts, begins = k_cache.shape[3], query_start.tolist(), tail.begins.tolist()
    one = torch.tensor([0, 1], dtype=torch.int32)
    for s in range(len(starts) - 1):
        for t in range(starts[s], starts[s + 1]):
            length = int(tail.positions[t]) + 1
            places = torch.arange(length, device=q.device)
            if length > begins[s]:
                places[begins[s] :] = begins[s] + tail.nodes[t, : length - begins[s]]
            first = int(find_first(tail.positions[t], window))
            blocks, at = table[s].long()[places // size], places % size
            line = torch.arange(length, dtype=torch.int32, device=q.device)[None]  # one position per block
            line = line.masked_fill(line < first, -1)
            blocks[:first] = 0
            out[t] = attention.reference(
                q[t : t + 1],
                bits(k_cache)[blocks, :, :, at].unsqueeze(3).view(k_cache.dtype),
                bits(v_cache)[blocks, :, at].unsqueeze(2).view(v_cache.dtype),
                line,
                one,
                torch.tensor([length]),
                scale,
                window,
                softcap,
                alibi,
                None if k_scale is None else _take_scales(k_scale, blocks, at, k_cache.dtype is torch.uint8),
                None if v_scale is None else v_scale[blocks, :, at].unsqueeze(2),
                sinks=sinks,
            )[0]
    return out
