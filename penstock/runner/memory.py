"""The block pool's tensors: one buffer of equal blocks, and each layer's view of its part of them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch

from penstock.cache.group import Grouping
from penstock.cache.layout import LAYOUTS
from penstock.engine.plan import Move
from penstock.errors import InvalidConfig
from penstock.runner.step import LayerCache

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
HUGE_PAGE = 1 << 21
CPU = torch.device("cpu")


def _room(num_bytes: int, device: torch.device) -> torch.Tensor:
    """On a CPU its pages are touched on first use, huge pages where there are such: a step reads all over the place."""
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)


class BlockMemory:
    """`num_blocks` blocks of `grouping.block_bytes`; a block lies in one piece, so a move is one copy."""

    def __init__(
        self, num_blocks: int, block_size: int, grouping: Grouping, kv_dtype: str, device: torch.device = CPU
    ) -> None:
        self.block_size = block_size
        self.grouping = grouping
        self.dtype = DTYPES[kv_dtype]
        self.layout = LAYOUTS[kv_dtype]
        try:
            # On a GPU steps are filled up with rows of nobody, whose slot is -1: the last block is theirs.
            count = num_blocks if device.type == "cpu" else num_blocks + 1
            self.blocks = _room(count * grouping.block_bytes, device).view(count, grouping.block_bytes)
        except (RuntimeError, TypeError, ValueError, OSError, OverflowError) as error:  # sizes past 64 bits too
            size = num_blocks * grouping.block_bytes / 2**30
            raise InvalidConfig(f"a cache of {size:.1f} GiB cannot be had: lower kv_cache_tokens") from error

    def layer_caches(self, shapes: Sequence[tuple[int, int] | None]) -> list[LayerCache | None]:
        """A view for each layer; `shapes` gives (K, D) of those that keep keys and values."""
        caches: list[LayerCache | None] = [None] * len(shapes)
        part = self.grouping.block_bytes // self.grouping.layers_per_block
        for g, group in enumerate(self.grouping.groups):
            for j, layer in enumerate(group.layers):
                shape = shapes[layer]
                if shape is not None:
                    caches[layer] = self._cache(j * part, *shape, group=g)
        return caches

    def _cache(self, offset: int, num_heads: int, head_size: int, group: int) -> LayerCache:
        """Keys [K, D, P], values [K, P, D] and, of an int8 cache, both scales [K, P], one after the other. On a GPU the
        keys lie as the values do."""
        size = self.block_size
        numbers = num_heads * size * self.layout.numbers_bytes(head_size)
        if self.blocks.is_cpu:
            k = self._view(offset, self.dtype, num_heads, head_size, size)
        else:
            k = self._view(offset, self.dtype, num_heads, size, head_size).transpose(2, 3)
        v = self._view(offset + numbers, self.dtype, num_heads, size, head_size)
        if not self.layout.scale_bytes:
            return LayerCache(k, v, group)
        scales = num_heads * size * self.layout.scale_bytes
        k_scale = self._view(offset + 2 * numbers, torch.float32, num_heads, size)
        v_scale = self._view(offset + 2 * numbers + scales, torch.float32, num_heads, size)
        return LayerCache(k, v, group, k_scale, v_scale)

    def _view(self, offset: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """[N, *shape] at this byte of every block."""
        strides = [1]
        for length in reversed(shape[1:]):
            strides.insert(0, strides[0] * length)
        typed = self.blocks.view(dtype)
        return typed.as_strided((typed.shape[0], *shape), (typed.shape[1], *strides), offset // dtype.itemsize)

    def move(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self.blocks[move.target].copy_(self.blocks[move.source])
