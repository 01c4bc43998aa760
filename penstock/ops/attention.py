"""Causal attention over the paged cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.ops.cache import bits, cache_pool
from penstock.ops.cache_write import cache_write
from penstock.ops.example import normal, permutation
from penstock.ops.registry import Example, op
from penstock.ops.rows import EachQuery


@dataclass(frozen=True)
class Shared:
    """Positions that several sequences with one query have in common: they are read once for a tile of them.

    members [S] int32 are the sequences, those of a tile one after the other; skips [S] int32 are how many positions of
    its own each sequence leaves out; tiles [n, 4] int32: the first member, how many, whose block table, how many
    positions. They are read in `num_parts` parts at once.
    """

    members: Tensor
    skips: Tensor
    tiles: Tensor
    num_parts: int = 4


@dataclass(frozen=True)
class Work:
    """How a step's queries are dealt out on a device that computes in tiles; elsewhere it is of no use.

    The first `num_single` sequences have one query each, whose keys are read in `num_parts` parts at once; `tiles` are
    [n, 2] int32, the sequence and its first query of each tile, for the others.
    """

    num_single: int
    tiles: Tensor | None = None
    num_parts: int = 1
    shared: Shared | None = None  # of no use with a window


def paged(
    seed: int,
    sequences: Sequence[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    **extra: object,
) -> Example:
    """A call for sequences given as (queries, length), their blocks scattered over a pool filled with noise."""
    counts, lengths = [c for c, _ in sequences], [n for _, n in sequences]
    width = max([-(-n // block) for n in lengths], default=0)
    num_blocks = sum(-(-n // block) for n in lengths) + 2
    free = iter(permutation(seed, num_blocks).tolist())
    table = torch.full((len(sequences), width), -1, dtype=torch.int32)
    for s, (count, length) in enumerate(sequences):
        first = max(0, length - count - window + 1) // block if window else 0
        for b in range(first, -(-length // block)):
            table[s, b] = next(free)
    caches = cache_pool(num_blocks, num_kv_heads, block, head_size, dtype)
    k, v = (normal(seed + i, num_blocks * block, num_kv_heads, head_size) for i in (2, 3))
    cache_write.reference(k, v, slots=torch.arange(num_blocks * block), **caches)
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    return {
        "q": normal(seed + 1, sum(counts), num_heads, head_size),
        **caches,
        "table": table,
        "query_start": starts,
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "scale": head_size**-0.5,
        "window": window,
        **extra,
    }


def _examples() -> Iterator[Example]:
    yield paged(0, [], 2, 1, 8)
    yield paged(1, [(1, 1)], 9, 3, 64)
    yield paged(2, [(1, 130), (7, 7), (0, 5), (5, 64), (3, 200)], 9, 3, 64)
    yield paged(3, [(17, 31), (1, 65)], 4, 4, 20, block=8)
    yield paged(4, [(1, 63), (2, 129)], 2, 1, 256, block=32)
    yield paged(5, [(1, 150), (40, 90), (3, 3)], 4, 2, 16, window=33)
    yield paged(6, [(2, 100), (70, 70)], 3, 1, 80, softcap=20.0)
    yield paged(7, [(1, 77), (9, 12)], 6, 6, 24, block=1, alibi=torch.linspace(0.01, 0.5, 6))
    for dtype in (torch.bfloat16, torch.float16, torch.int8):
        yield paged(8, [(1, 100), (13, 13), (2, 66)], 4, 2, 33, dtype=dtype, window=50, softcap=30.0)
        yield paged(9, [(1, 700), (20, 40), (1, 3)], 9, 3, 64, dtype=dtype)
        yield paged(10, [(3, 300), (1, 64)], 5, 1, 96, block=32, dtype=dtype, alibi=torch.linspace(0.01, 0.5, 5))
        yield paged(11, [(9, 70), (50, 50)], 2, 2, 16, block=4, dtype=dtype)
    yield paged(12, [(1, 600)], 7, 1, 48, dtype=torch.float16, window=200)


def _scores(
    q: Tensor, k: Tensor, visible: Tensor, distance: Tensor, scale: float, softcap: float, alibi: Tensor | None
) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi is not None:
        scores = scores + alibi.view(-1, 1, 1) * distance
    return scores.masked_fill(~visible, -torch.inf)


@op(tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}, examples=_examples, rows=EachQuery())
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
) -> Tensor:
    """q[T, H, D] over keys [N, K, D, P] and values [N, K, P, D] → [T, H, D].

    The queries query_start[s]:query_start[s+1] are the last of the lengths[s] positions of sequence s; position j lies
    in block table[s, j // P]. A query at position i sees 0..i, with a window the last `window` of them; entries of
    `table` before the first visible position are never read. softcap bounds the scaled score; alibi[H] then adds
    slope · (j - i). An int8 cache's codes are multiplied by their scales [N, K, P].
    """
    out = torch.empty_like(q)
    size, groups = k_cache.shape[3], q.shape[1] // k_cache.shape[1]
    starts = query_start.tolist()
    for s, length in enumerate(lengths.tolist()):
        begin, end = starts[s], starts[s + 1]
        i = torch.arange(length - (end - begin), length, device=q.device).unsqueeze(1)
        first = max(0, length - (end - begin) - window + 1) if window else 0
        j = torch.arange(first, length, device=q.device)
        blocks = table[s].long()[j // size]
        k = bits(k_cache)[blocks, :, :, j % size].view(k_cache.dtype).float()
        v = bits(v_cache)[blocks, :, j % size].view(v_cache.dtype).float()
        if k_scale is not None and v_scale is not None:
            k, v = (x * y[blocks, :, j % size].unsqueeze(-1) for x, y in ((k, k_scale), (v, v_scale)))
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        visible = (j <= i) & (j > i - window) if window else j <= i
        scores = _scores(q[begin:end].float(), k, visible, j - i, scale, softcap, alibi)
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
    return out
