"""The block pool's tensors: one buffer of equal blocks, and each layer's view of its part of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.cache.group import Grouping
from penstock.engine.plan import Move
from penstock.errors import InvalidConfig
from penstock.runner.step import LayerCache


class BlockMemory:
    """`num_blocks` blocks of `grouping.block_bytes`; a block lies in one piece, so a move is one copy."""

    def __init__(self, num_blocks: int, block_size: int, grouping: Grouping, dtype: torch.dtype) -> None:
        self.block_size = block_size
        self.grouping = grouping
        self.dtype = dtype
        self._elements = grouping.block_bytes // dtype.itemsize
        try:
            self.blocks = torch.empty(num_blocks, self._elements, dtype=dtype)     # pages are touched on first use
        except (RuntimeError, TypeError) as error:      # TypeError: a size past 64 bits
            size = num_blocks * grouping.block_bytes / 2**30
            raise InvalidConfig(f"a cache of {size:.1f} GiB cannot be had: lower kv_cache_tokens") from error

    def layer_caches(self, shapes: Sequence[tuple[int, int] | None]) -> list[LayerCache | None]:
        """A view for each layer; `shapes` gives (K, D) of those that keep keys and values."""
        caches: list[LayerCache | None] = [None] * len(shapes)
        part = self._elements // self.grouping.layers_per_block
        for g, group in enumerate(self.grouping.groups):
            for j, layer in enumerate(group.layers):
                shape = shapes[layer]
                if shape is not None:
                    caches[layer] = LayerCache(*self._views(j * part, *shape), group=g)
        return caches

    def _views(self, offset: int, num_heads: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, then values, each [K, P, D] within its block."""
        size = (self.blocks.shape[0], num_heads, self.block_size, head_size)
        stride = (self._elements, self.block_size * head_size, head_size, 1)
        values = offset + num_heads * self.block_size * head_size
        return self.blocks.as_strided(size, stride, offset), self.blocks.as_strided(size, stride, values)

    def move(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self.blocks[move.target].copy_(self.blocks[move.source])
