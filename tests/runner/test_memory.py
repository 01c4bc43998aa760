"""Every layer's keys, values and scales have a place of their own in each block, and moves carry all of it."""

from __future__ import annotations

import pytest
import torch

from penstock.cache.group import group_layers
from penstock.cache.layout import LAYOUTS
from penstock.cache.state import StateSpec
from penstock.engine.plan import Move
from penstock.errors import InvalidConfig
from penstock.runner.memory import DTYPES, BlockMemory
from penstock.runner.step import LayerCache


def _memory(kv_dtype: str, num_heads: int, head_size: int, size: int, num_blocks: int = 5) -> BlockMemory:
    """Two full layers, which share their blocks, and two with a window."""
    width = LAYOUTS[kv_dtype].position_bytes(num_heads, head_size)
    states = [StateSpec("full", width)] * 2 + [StateSpec("window", width, 8)] * 2
    return BlockMemory(num_blocks, size, group_layers(states, size), kv_dtype)


def _parts(cache: LayerCache | None) -> list[torch.Tensor]:
    assert cache is not None
    return [part for part in (cache.k, cache.v, cache.k_scale, cache.v_scale) if part is not None]


@pytest.mark.parametrize("kv_dtype", LAYOUTS)
@pytest.mark.parametrize(("num_heads", "head_size", "size"), [(3, 64, 16), (1, 33, 1), (2, 5, 3), (1, 256, 256)])
def test_nothing_overlaps(kv_dtype: str, num_heads: int, head_size: int, size: int) -> None:
    memory = _memory(kv_dtype, num_heads, head_size, size)
    memory.blocks.fill_(0)
    caches = memory.layer_caches([(num_heads, head_size)] * 4)
    for cache in caches:
        parts = _parts(cache)
        assert [part.shape for part in parts[:2]] == [(5, num_heads, head_size, size), (5, num_heads, size, head_size)]
        assert [part.shape for part in parts[2:]] == [(5, num_heads, size)] * (2 if kv_dtype == "int8" else 0)
        assert parts[0].dtype is DTYPES[kv_dtype] and all(part.data_ptr() % part.element_size() == 0 for part in parts)
    assert [cache.group for cache in caches if cache] == [0, 0, 1, 1]
    one_group = [part for cache in caches[:2] for part in _parts(cache)]
    for number, part in enumerate(one_group, 1):
        part.fill_(number)
    for number, part in enumerate(one_group, 1):
        assert (part == number).all()
    used = sum(part.nbytes for part in one_group)
    assert memory.blocks.count_nonzero() <= used <= memory.blocks.numel()


@pytest.mark.parametrize("kv_dtype", LAYOUTS)
def test_a_move_carries_the_whole_block(kv_dtype: str) -> None:
    memory = _memory(kv_dtype, 2, 20, 4)
    memory.blocks.copy_(torch.randint(0, 100, memory.blocks.shape))
    parts = [part for cache in memory.layer_caches([(2, 20)] * 4) for part in _parts(cache)]
    before = [part[1].clone() for part in parts]
    memory.move([Move(source=1, target=3), Move(source=3, target=0)])
    assert all(torch.equal(part[target], old) for part, old in zip(parts, before) for target in (0, 1, 3))


def test_large_memory_is_had_and_given_back() -> None:
    memory = _memory("float16", 3, 64, 16, num_blocks=1000)
    assert memory.blocks.nbytes > 1 << 24
    memory.blocks[::100] = 7
    assert memory.blocks[100].eq(7).all() and memory.blocks[101].eq(0).all()
    with pytest.raises(InvalidConfig, match="lower kv_cache_tokens"):
        _memory("float16", 3, 64, 16, num_blocks=10**13)
