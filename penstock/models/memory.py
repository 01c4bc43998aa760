"""Memory that a layer keeps between steps, as plain data: its size for the cache, and its view of the block pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.cache.group import LAYOUTS, KvLayout, StateSpec
from penstock.errors import InvalidConfig

if TYPE_CHECKING:  # configs are read without torch
    from torch import Tensor

    from penstock.layers.memory import KvCache, LatentCache, LayerMemory, StateRows


class Pool(Protocol):
    """Blocks of equal size, viewed as [N, *shape] at a byte offset within every block."""

    block_size: int
    block_bytes: int
    layout: KvLayout
    keys_by_position: bool

    def view(self, offset: int, *shape: int) -> Tensor:
        """View numbers of the cache's dtype."""
        ...

    def view_float32(self, offset: int, *shape: int) -> Tensor: ...

    def view_float16(self, offset: int, *shape: int) -> Tensor: ...

    def keep_as(self, kv_dtype: str) -> Pool:
        """View the same blocks with numbers of another dtype."""
        ...


class Memory(Protocol):
    def state(self, layout: KvLayout) -> StateSpec:
        """Describe this memory to the cache when keys and values are stored like `layout`."""
        ...

    def view(self, pool: Pool, group: int, offset: int) -> LayerMemory:
        """Make the layer's tensors; `offset` counts the bytes of the group's earlier layers."""
        ...


@dataclass(frozen=True)
class KvMemory:
    """Keys and values of every position, or of the last `window` positions."""

    num_kv_heads: int
    head_size: int
    window: int = 0  # 0: all positions
    num_heads: int = 0  # query heads that read it
    dtype: str = ""  # where it is not the cache's

    def state(self, layout: KvLayout) -> StateSpec:
        layout = LAYOUTS[self.dtype] if self.dtype else layout
        if layout.group and self.head_size % 2:
            raise InvalidConfig(
                f"kv_cache_dtype=int4 stores two numbers a byte, but heads have {self.head_size}: set int8"
            )
        position_bytes = layout.position_bytes(self.num_kv_heads, self.head_size)
        return StateSpec("window" if self.window else "full", position_bytes, self.window)

    def view(self, pool: Pool, group: int, offset: int) -> KvCache:
        """Lay out keys [K, D, P], values [K, P, D] and the scales of codes, one after the other, as
        `penstock.ops.attention.cache` has them. With `keys_by_position` the keys are stored like the values."""
        from penstock.layers.memory import KvCache

        pool = pool.keep_as(self.dtype) if self.dtype else pool
        heads, head_size, size = self.num_kv_heads, self.head_size, pool.block_size
        numbers = heads * size * pool.layout.numbers_bytes(head_size)
        scales = heads * size * pool.layout.scales_bytes(head_size)
        starts = (offset + 2 * numbers, offset + 2 * numbers + scales)
        if pool.layout.group:
            groups, rows = -(-head_size // pool.layout.group), head_size // 2
            k, v = pool.view(offset, heads, rows, size), pool.view(offset + numbers, heads, size, rows)
            k_scale = pool.view_float16(starts[0], heads, groups, 2, size)
            return KvCache(k, v, group, k_scale, pool.view_float16(starts[1], heads, size, groups, 2))
        if pool.keys_by_position:
            k = pool.view(offset, heads, size, head_size).transpose(2, 3)
        else:
            k = pool.view(offset, heads, head_size, size)
        v = pool.view(offset + numbers, heads, size, head_size)
        if not scales:
            return KvCache(k, v, group)
        return KvCache(k, v, group, *(pool.view_float32(start, heads, size) for start in starts))


@dataclass(frozen=True)
class LatentMemory:
    """One vector of `width` numbers per position."""

    width: int
    num_heads: int = 0  # that read it
    dtype: str = ""  # where it is not the cache's

    def state(self, layout: KvLayout) -> StateSpec:
        layout = LAYOUTS[self.dtype] if self.dtype else layout
        if layout.bits < 16:
            name = next(name for name, known in LAYOUTS.items() if known == layout)
            raise InvalidConfig(
                f"kv_cache_dtype={name} cannot hold latents, which stand for the keys and values of all heads: "
                "set bfloat16, float16 or float32"
            )
        return StateSpec("full", layout.numbers_bytes(self.width))

    def view(self, pool: Pool, group: int, offset: int) -> LatentCache:
        from penstock.layers.memory import LatentCache

        pool = pool.keep_as(self.dtype) if self.dtype else pool
        return LatentCache(pool.view(offset, pool.block_size, self.width), group)


@dataclass(frozen=True)
class RecurrentMemory:
    """One state per sequence: `num_rows` rows of `row_size` float32 numbers, whatever the cache's dtype."""

    num_rows: int
    row_size: int

    def state(self, layout: KvLayout) -> StateSpec:
        return StateSpec("recurrent", num_rows=self.num_rows, row_bytes=4 * self.row_size)

    def view(self, pool: Pool, group: int, offset: int) -> StateRows:
        from penstock.layers.memory import StateRows

        row_bytes = 4 * self.row_size
        rows = pool.view_float32(0, pool.block_bytes // row_bytes, self.row_size)
        return StateRows(rows, group, offset // row_bytes, self.num_rows)
