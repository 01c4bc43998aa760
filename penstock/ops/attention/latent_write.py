"""Storing the latents of new tokens in the paged cache, and copying them there."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.attention.cache import cast_to_cache
from penstock.ops.registry import op


@op(tolerance={torch.float32: 0.0}, rowwise=True)
def latent_write(latent: Tensor, k_rope: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write latent [T, R], and k_rope [T, W - R] after it, into the cache [N, P, W] at slots[T] = block · P + offset,
    rounded as in `cache_write`."""
    size = cache.shape[1]
    cache[slots // size, slots % size] = cast_to_cache(torch.cat([latent, k_rope], dim=1), cache.dtype)


@op(tolerance={torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}, rowwise=True)
def latent_move(cache: Tensor, moves: Tensor) -> None:
    """Copy what the cache [N, P, W] holds at slot moves[i, 0] to slot moves[i, 1], one i after the other."""
    size = cache.shape[1]
    for source, target in moves.tolist():
        cache[target // size, target % size] = cache[source // size, source % size]
