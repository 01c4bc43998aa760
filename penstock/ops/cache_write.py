"""Storing keys and values of new tokens in the paged cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.cache import bits, cache_pool, quantized, stored
from penstock.ops.example import normal, permutation
from penstock.ops.registry import Example, op
from penstock.ops.rows import EachSlot


def _examples() -> Iterator[Example]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8):
        shapes = [(0, 1, 8, 4), (1, 3, 64, 16), (13, 2, 20, 8), (110, 3, 64, 16)]
        for seed, (num_tokens, num_heads, size, block) in enumerate(shapes):
            yield {
                "k": normal(seed, num_tokens, num_heads, size),
                "v": normal(seed + 9, num_tokens, num_heads, size),
                **cache_pool(9, num_heads, block, size, dtype),
                "slots": permutation(seed, 9 * block)[:num_tokens],
            }
    qkv = normal(40, 5, 6, 12)
    caches = cache_pool(4, 2, 4, 12, torch.float32)
    yield {"k": qkv[:, 2:4], "v": qkv[:, 4:6], **caches, "slots": permutation(4, 16)[:5]}
    extremes = torch.tensor([0.0, 1e-42, 65519.0, 65520.0, -1e9, torch.inf, -torch.inf, torch.nan]).repeat(4, 5)
    extremes = torch.stack([extremes, torch.zeros(4, 40)], dim=1)
    extremes[1, :, 5:] = 1e-40
    for dtype in (torch.float16, torch.int8):
        yield {"k": extremes, "v": extremes.flip(0), **cache_pool(3, 2, 16, 40, dtype), "slots": permutation(5, 48)[:4]}


@op(tolerance={torch.float32: 0.0}, examples=_examples, rows=EachSlot("k", "v", "slots"), rowwise=True)
def cache_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write k and v [T, K, D] into the caches [N, K, D, P] and [N, K, P, D] at slots[T] = block · P + offset.

    Values are rounded to the caches' dtype; with int8 the scales [N, K, P] say what a code of 1 stands for.
    """
    block, place = slots // k_cache.shape[3], slots % k_cache.shape[3]
    if k_scale is not None and v_scale is not None:
        k_cache[block, :, :, place], k_scale[block, :, place] = quantized(k)
        v_cache[block, :, place], v_scale[block, :, place] = quantized(v)
    else:
        bits(k_cache)[block, :, :, place] = bits(stored(k, k_cache.dtype))
        bits(v_cache)[block, :, place] = bits(stored(v, v_cache.dtype))
