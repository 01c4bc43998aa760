"""Causal attention over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.ops.attention.cache import read_cache
from penstock.ops.registry import op


@dataclass(frozen=True)
class Shared:
    """Positions that several sequences with one query have in common: they are read once for a tile of them.

    members [S] int32 are the sequences, those of a tile one after the other; skips [S] int32 are how many positions of
    its own each sequence leaves out; tiles [n, 4] int32: the first member, how many, whose block table, how many
    positions. They are read in `num_kv_splits` splits at once.
    """

    members: Tensor
    skips: Tensor
    tiles: Tensor
    num_kv_splits: int = 4


@dataclass(frozen=True)
class Work:
    """The split of a step's queries on a device that computes in tiles; other devices ignore it.

    The first `num_single` sequences have one query each, whose keys are read in `num_kv_splits` splits at once;
    `tiles` are [n, 2] int32, the sequence and its first query of each tile, for the others.
    """

    num_single: int
    tiles: Tensor | None = None
    num_kv_splits: int = 1
    shared: Shared | None = None  # of no use with a window
    single_lengths: Tensor | None = None  # of the first `num_single`, where some of them are not decode rows: 0
    num_tiles: Tensor | None = None  # [1] int32: so many of the tiles have queries and come first; else all have
    longest: int | None = None  # positions of the longest sequence with tiles, where the host knows

    def find_lengths(self, lengths: Tensor) -> Tensor:
        """Return the lengths of the first `num_single`, given those of all sequences."""
        return lengths if self.single_lengths is None else self.single_lengths


def _scores(
    q: Tensor, k: Tensor, visible: Tensor, distance: Tensor, scale: float, softcap: float, alibi: Tensor | None
) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi is not None:
        scores = scores + alibi.view(-1, 1, 1) * distance
    return scores.masked_fill(~visible, -torch.inf)


def find_first(positions: Tensor, window: int) -> Tensor:
    """Return the first position that a query at each of `positions` sees."""
    if window < 0:
        return positions - positions % -window
    return (positions - window + 1).clamp(min=0) if window else torch.zeros_like(positions)


@op(tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3})
def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    work: Work | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q[T, H, D] over keys [N, K, D, P] and values [N, K, P, D] → [T, H, D].

    The queries query_start[s]:query_start[s+1] are the last of the lengths[s] positions of sequence s; position j lies
    in block table[s, j // P]. A query at position i sees 0..i; with a window the last `window` of them; with a negative
    one those from the last multiple of -window on. Entries of `table` before the first visible position are never read.
    softcap bounds the scaled score; alibi[H] then adds slope · (j - i). The codes of an int8 or int4 cache are widened
    by their scales. sinks[H] are scores that take weight but have no value.
    """
    out = torch.empty_like(q)
    size, groups = k_cache.shape[3], q.shape[1] // k_cache.shape[1]
    starts = query_start.tolist()
    for s, length in enumerate(lengths.tolist()):
        begin, end = starts[s], starts[s + 1]
        i = torch.arange(length - (end - begin), length, device=q.device).unsqueeze(1)
        first = int(find_first(i[:1], window)[0]) if end > begin else 0
        j = torch.arange(first, length, device=q.device)
        blocks = table[s].long()[j // size]
        k, v = read_cache(k_cache, v_cache, k_scale, v_scale, blocks, j % size)
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        visible = (j <= i) & (j >= find_first(i, window))
        scores = _scores(q[begin:end].float(), k, visible, j - i, scale, softcap, alibi)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().view(-1, 1, 1).expand(-1, end - begin, 1)], dim=2)
        weights = scores.softmax(-1)[..., : length - first]
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out
