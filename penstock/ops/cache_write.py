"""Storing keys and values of new tokens in the paged cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.example import normal, permutation
from penstock.ops.registry import Example, op
from penstock.ops.rows import EachSlot


def _examples() -> Iterator[Example]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        shapes = [(0, 1, 8, 4), (1, 3, 64, 16), (13, 2, 20, 8), (110, 3, 64, 16)]
        for seed, (num_tokens, num_heads, size, block) in enumerate(shapes):
            pool = torch.zeros(9, 2, num_heads, block, size, dtype=dtype)
            yield {"k": normal(seed, num_tokens, num_heads, size), "v": normal(seed + 9, num_tokens, num_heads, size),
                   "k_cache": pool[:, 0], "v_cache": pool[:, 1],
                   "slots": permutation(seed, 9 * block)[:num_tokens]}
    qkv = normal(40, 5, 6, 12)
    pool = torch.zeros(2, 4, 2, 4, 12)
    yield {"k": qkv[:, 2:4], "v": qkv[:, 4:6], "k_cache": pool[0], "v_cache": pool[1], "slots": permutation(4, 16)[:5]}


@op(tolerance={torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}, examples=_examples,
    rows=EachSlot("k", "v", "slots"))
def cache_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write k and v [T, K, D] into the caches [N, K, P, D] at slots[T] = block · P + offset, rounded to their dtype."""
    size = k_cache.shape[2]
    k_cache[slots // size, :, slots % size] = k.to(k_cache.dtype)
    v_cache[slots // size, :, slots % size] = v.to(v_cache.dtype)
