"""Copying keys and values from slot to slot of the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import op


@op(tolerance={torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}, rowwise=True)
def cache_move(
    k_cache: Tensor, v_cache: Tensor, moves: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None
) -> None:
    """Copy what the caches [N, K, D, P] and [N, K, P, D] hold at slot moves[i, 0] to slot moves[i, 1], one i after the
    other, as it is stored; with the scales of codes."""
    size = k_cache.shape[3]
    for source, target in moves.tolist():
        (block, place), (to_block, to_place) = divmod(source, size), divmod(target, size)
        by_position = [v_cache, v_scale]
        if k_cache.dtype is torch.uint8 and k_scale is not None:
            k_scale[to_block, ..., to_place] = k_scale[block, ..., place]
        else:
            by_position.append(k_scale)
        k_cache[to_block, :, :, to_place] = k_cache[block, :, :, place]
        for cache in by_position:
            if cache is not None:
                cache[to_block, :, to_place] = cache[block, :, place]
