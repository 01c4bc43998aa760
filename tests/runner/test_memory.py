"""Every layer's keys, values and scales have a place of their own in each block, and moves carry all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.cache.group import LAYOUTS, StateSpec, group_layers
from penstock.engine.plan import Admission, Move, Output, Plan, Row
from penstock.errors import InvalidConfig
from penstock.layers import KvCache, LatentCache, StateRows
from penstock.models.memory import KvMemory, LatentMemory, Memory, RecurrentMemory
from penstock.runner.cpu.buffers import Buffers
from penstock.runner.memory import DTYPES, BlockMemory
from penstock.runner.rows import RunningRows
from penstock.runner.step import Step, ends_of
from penstock.types import Request


def _memory(kv_dtype: str, num_heads: int, head_size: int, size: int, num_blocks: int = 5) -> BlockMemory:
    """Two full layers, which share their blocks, and two with a window."""
    width = LAYOUTS[kv_dtype].position_bytes(num_heads, head_size)
    states = [StateSpec("full", width)] * 2 + [StateSpec("window", width, 8)] * 2
    return BlockMemory(num_blocks, size, group_layers(states, size), kv_dtype)


def _parts(cache: KvCache | None) -> list[torch.Tensor]:
    assert cache is not None
    return [part for part in (cache.k, cache.v, cache.k_scale, cache.v_scale) if part is not None]


@pytest.mark.parametrize("kv_dtype", LAYOUTS)
@pytest.mark.parametrize(
    ("num_heads", "head_size", "size"), [(3, 64, 16), (1, 33, 1), (1, 34, 1), (2, 5, 3), (2, 6, 3), (1, 256, 256)]
)
def test_nothing_overlaps(kv_dtype: str, num_heads: int, head_size: int, size: int) -> None:
    memory = _memory(kv_dtype, num_heads, head_size, size)
    if kv_dtype == "int4" and head_size % 2:
        with pytest.raises(InvalidConfig, match=f"heads have {head_size}: set int8"):
            KvMemory(num_heads, head_size).state(LAYOUTS[kv_dtype])
        return
    memory.blocks.fill_(0)
    caches = memory.views([KvMemory(num_heads, head_size)] * 4)
    for cache in caches:
        parts = _parts(cache)
        rows, groups = (head_size // 2 if kv_dtype == "int4" else head_size), -(-head_size // 32)
        assert [part.shape for part in parts[:2]] == [(5, num_heads, rows, size), (5, num_heads, size, rows)]
        both: dict[str, list[tuple[int, ...]]] = {"int8": [(size,)] * 2, "int4": [(groups, 2, size), (size, groups, 2)]}
        scales = both.get(kv_dtype, [])
        assert [part.shape for part in parts[2:]] == [(5, num_heads, *shape) for shape in scales]
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
    parts = [part for cache in memory.views([KvMemory(2, 20)] * 4) for part in _parts(cache)]
    before = [part[1].clone() for part in parts]
    memory.move([Move(source=1, target=3), Move(source=3, target=0)])
    assert all(torch.equal(part[target], old) for part, old in zip(parts, before) for target in (0, 1, 3))


def _hybrid(kv_dtype: str, size: int = 4, num_blocks: int = 40) -> tuple[BlockMemory, list[Any]]:
    """Two latent layers, three recurrent ones whose rows do not divide a block, and one that keeps nothing."""
    memories: list[Memory | None] = [LatentMemory(9), RecurrentMemory(5, 7), None, RecurrentMemory(5, 7)]
    memories += [LatentMemory(9), RecurrentMemory(5, 7)]
    layout = LAYOUTS[kv_dtype]
    grouping = group_layers([memory.state(layout) if memory else None for memory in memories], size)
    memory = BlockMemory(num_blocks, size, grouping, kv_dtype)
    memory.blocks.fill_(0)
    return memory, memory.views(memories)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
def test_latent_and_recurrent_layers_have_memory_of_their_own(kv_dtype: str) -> None:
    memory, views = _hybrid(kv_dtype)
    latents, states = [views[0], views[4]], [views[1], views[3], views[5]]
    assert views[2] is None
    assert all(isinstance(view, LatentCache) and view.latent.shape == (40, 4, 9) for view in latents)
    assert [view.first_row for view in states] == [0, 5, 10]
    group = memory.grouping.groups[1]
    assert group.blocks_per_state * states[0].rows.shape[1] >= 15 and not group.is_paged
    tables = torch.randperm(40)[: 3 * group.blocks_per_state].view(3, -1).int()
    where = [view.locate(tables) for view in states]
    for number, (view, (blocks, rows)) in enumerate(zip(states, where), 1):
        assert isinstance(view, StateRows) and view.rows.dtype is torch.float32
        view.rows[blocks, rows] = number * torch.arange(1.0, 4)[:, None, None].expand(3, 5, 7)
    for number, (view, (blocks, rows)) in enumerate(zip(states, where), 1):
        assert view.rows[blocks, rows].tolist() == [[[number * float(s)] * 7] * 5 for s in (1, 2, 3)]
    used = set(tables.flatten().tolist())
    assert all(memory.blocks[block].count_nonzero() == 0 for block in range(40) if block not in used)
    free = next(block for block in range(40) if block not in used)
    for number, view in enumerate(latents, 1):
        view.latent[free] = number
    assert [set(view.latent[free].flatten().tolist()) for view in latents] == [{1.0}, {2.0}]


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "fp8"])
def test_latents_are_not_kept_in_few_bits(kv_dtype: str) -> None:
    with pytest.raises(InvalidConfig, match=f"kv_cache_dtype={kv_dtype} cannot hold latents"):
        _hybrid(kv_dtype)


def test_a_recurrent_group_has_a_table_and_no_slots() -> None:
    groups = _hybrid("float32")[0].grouping.groups
    width = groups[1].blocks_per_state
    assert width > 1
    row = Row(0, 5, 2, Output.NONE, ({0: 11, 1: 3}, dict(enumerate(range(20, 20 + width)))))
    request = Request(id="", tokens=tuple(range(7)))
    plan = Plan(1, (row,), (Admission(0, request, 0, request.tokens),))
    rows = RunningRows(2)
    rows.apply(plan)
    buffers = Buffers(8, 2, groups, 16, 4)
    step = buffers.step(buffers.fill(plan, rows.of(plan), ()))
    assert step.places is not None and step.places.tolist() == step.positions.tolist() == [5, 6]
    assert step.slots[0].tolist() == [13, 14] and step.slots[1] is None
    assert step.tables[1].tolist() == [list(range(20, 20 + width))]
    ends = ends_of(step, torch.tensor([1]), torch.tensor([0])).step
    assert ends.slots[0].tolist() == [14] and ends.slots[1] is None and ends.lengths.tolist() == [7]
    assert ends.tables[1].tolist() == step.tables[1].tolist()


def test_slots_and_lengths_follow_from_places() -> None:
    one = torch.tensor([4, 5])
    table, starts = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    step = Step(one, one + 100, [one], [table], starts, starts[1:], places=one)
    ends = ends_of(step.cut(2, 1), torch.tensor([1]), torch.tensor([0])).step
    assert (ends.positions.tolist(), ends.lengths.tolist()) == ([105], [6])


def test_large_memory_is_had_and_given_back() -> None:
    memory = _memory("float16", 3, 64, 16, num_blocks=1000)
    assert memory.blocks.nbytes > 1 << 24
    memory.blocks[::100] = 7
    assert memory.blocks[100].eq(7).all() and memory.blocks[101].eq(0).all()
    with pytest.raises(InvalidConfig, match="lower kv_cache_tokens"):
        _memory("float16", 3, 64, 16, num_blocks=10**13)


def test_a_model_that_keeps_nothing_has_no_memory() -> None:
    memory = BlockMemory(5, 16, group_layers([None, None], 16), "float32")
    assert memory.blocks.nbytes == 0 and memory.views([None, None]) == [None, None]
