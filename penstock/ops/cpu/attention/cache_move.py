from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.attention.cache import head_size_of
from penstock.ops.attention.cache_move import cache_move
from penstock.ops.cpu.attention.cache import cache_arguments
from penstock.ops.cpu.runtime.library import Kernel, as_integers

_kernel = Kernel("cache_move", "pnpnpnpnipnnnnn")


@cache_move.impl("cpu", exact=True)
def _cache_move(
    k_cache: Tensor, v_cache: Tensor, moves: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None
) -> None:
    caches = cache_arguments(k_cache, v_cache, k_scale, v_scale)
    moves = as_integers(moves, torch.int64)
    if moves.dim() != 2 or moves.shape[1] != 2:
        raise ValueError(f"moves {tuple(moves.shape)} must be [n, 2]: a source and a target each")
    num_blocks, num_heads, _, size = k_cache.shape
    head_size = head_size_of(k_cache)
    _kernel(*caches, moves.data_ptr(), moves.shape[0], num_blocks, num_heads, size, head_size)
