"""The tensors of the block pool: one buffer of equal blocks, and each layer's view of its part of them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock import ops
from penstock.cache.group import LAYOUTS, Grouping
from penstock.errors import InvalidConfig
from penstock.models.memory import Memory

if TYPE_CHECKING:
    from penstock.engine.plan import Move

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "int4": torch.uint8,
    "fp8": torch.float8_e4m3fn,
}
HUGE_PAGE = 1 << 21
PADDING = (-1, 0)  # a move of nothing
CPU = torch.device("cpu")


def allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate bytes; on a CPU as huge pages if possible, which are touched on first use."""
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the kernel has no huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)


class BlockMemory:
    """`num_blocks` contiguous blocks of `grouping.block_bytes`."""

    def __init__(
        self, num_blocks: int, block_size: int, grouping: Grouping, kv_dtype: str, device: torch.device = CPU
    ) -> None:
        self.block_size = block_size
        self.block_bytes = grouping.block_bytes
        self.grouping = grouping
        self.dtype = DTYPES[kv_dtype]
        self.layout = LAYOUTS[kv_dtype]
        self.keys_by_position = device.type != "cpu"
        try:
            # Padding rows of a GPU's steps have slot -1: the last block is theirs.
            count = num_blocks if device.type == "cpu" else num_blocks + 1
            self.blocks = allocate(count * grouping.block_bytes, device).view(count, grouping.block_bytes)
        except (RuntimeError, TypeError, ValueError, OSError, OverflowError) as error:  # sizes past 64 bits too
            size = num_blocks * grouping.block_bytes / 2**30
            raise InvalidConfig(f"cannot allocate a KV cache of {size:.1f} GiB: lower kv_cache_tokens") from error

    def views(self, memories: Sequence[Memory | None]) -> list[Any]:
        """Make each layer's view of its part of the blocks; None for a layer that keeps nothing. Layers after those
        given are left out."""
        views: list[Any] = [None] * len(memories)
        for g, group in enumerate(self.grouping.groups):
            for j, layer in enumerate(group.layers):
                if layer >= len(memories):
                    continue
                memory = memories[layer]
                assert memory is not None
                views[layer] = memory.view(self, g, j * group.part_bytes)
        return views

    def view(self, offset: int, *shape: int) -> torch.Tensor:
        """View [N, *shape] numbers of the cache's dtype at this byte of every block."""
        return _view(self.blocks.view(self.dtype), offset // self.dtype.itemsize, shape)

    def view_float32(self, offset: int, *shape: int) -> torch.Tensor:
        return _view(self.blocks.view(torch.float32), offset // 4, shape)

    def view_float16(self, offset: int, *shape: int) -> torch.Tensor:
        return _view(self.blocks.view(torch.float16), offset // 2, shape)

    def keep_as(self, kv_dtype: str) -> BlockMemory:
        """View the same blocks with numbers of another dtype."""
        other = copy(self)
        other.dtype, other.layout = DTYPES[kv_dtype], LAYOUTS[kv_dtype]
        return other

    @property
    def words(self) -> torch.Tensor:
        """The blocks as int32 [N, W]."""
        return self.blocks.view(torch.int32)

    def move(self, moves: Sequence[Move]) -> None:
        """Copy blocks in order, in one call, padded to a power of two."""
        pairs = [(move.source, move.target) for move in moves]
        pairs += [PADDING] * ((1 << (len(pairs) - 1).bit_length()) - len(pairs))
        given = torch.tensor(pairs, dtype=torch.int64)
        if not self.blocks.is_cpu:
            given = given.pin_memory().to(self.blocks.device, non_blocking=True)
        ops.block_move(self.words, given)

    def read(self, blocks: Sequence[int]) -> bytes:
        """Copy blocks to the host, one after the other, after all steps that were started."""
        if not self.blocks.is_cpu:
            return self.blocks[list(blocks)].cpu().numpy().tobytes()
        rows = self.blocks.numpy()
        return b"".join(rows[block].tobytes() for block in blocks)

    def write(self, blocks: Sequence[int], data: bytes) -> bool:
        """Fill blocks with what `read` returned; False if it is not of their size."""
        if len(data) != len(blocks) * self.block_bytes:
            return False
        whole = np.frombuffer(data, dtype=np.uint8).reshape(len(blocks), self.block_bytes)
        if not self.blocks.is_cpu:
            self.blocks[list(blocks)] = torch.from_numpy(whole.copy()).pin_memory().to(self.blocks.device)
            return True
        rows = self.blocks.numpy()
        for block, row in zip(blocks, whole):
            rows[block] = row
        return True


def _view(blocks: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return blocks.as_strided((blocks.shape[0], *shape), (blocks.shape[1], *strides), offset)
