"""Snapshots of recurrent states: how far apart they are taken, and how much of the pool they may fill."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.cache.group import Group, StateSpec, group_layers
from penstock.cache.holding import choose_stride
from penstock.cache.kv import KVCache
from penstock.cache.radix import Root
from tests.cache.content import FULL, STATE, Content

MIB = 1 << 20


def _groups(num_full: int, position_bytes: int, num_states: int, state_mib: float) -> tuple[Group, ...]:
    """States of `state_mib` in all, in rows of 64 KiB."""
    rows = round(state_mib * MIB / num_states / 65536)
    states = [StateSpec("full", position_bytes)] * num_full
    return group_layers(states + [StateSpec("recurrent", num_rows=rows, row_bytes=65536)] * num_states, 16).groups


@pytest.mark.parametrize(
    ("groups", "stride"),
    [
        (_groups(12, 2048, 36, 74.25), 3168),  # Qwen3-Next 80B
        (_groups(4, 4096, 28, 15.75), 1008),  # Jamba mini
        (_groups(9, 20480, 54, 67.5), 512),  # like Zamba2
        (_groups(0, 0, 64, 160), 512),  # Mamba-2 2.7B: nothing to compare with
        (_groups(32, 4096, 1, 0.0625), 512),  # a small state: a chunk must be worth its while
    ],
)
def test_a_stride_takes_as_many_bytes_as_a_state(groups: tuple[Group, ...], stride: int) -> None:
    assert choose_stride(groups, 16, 512) == stride
    assert KVCache(10, 16, groups).snapshot_stride == stride
    assert choose_stride(groups, 256, 512) % 256 == 0 and choose_stride(groups, 256, 512) >= 1024


def test_snapshots_fill_a_quarter_of_the_pool_at_most() -> None:
    """Those not used for longest go; one that a sequence is about to resume from stays."""
    content = Content(32, 4, [FULL, STATE])
    cache, size = content.cache, 4
    assert cache.snapshots.max_blocks == 8
    first, *others = ([text] * 9 for text in range(6))
    for tokens in (first, *others[:3]):
        writer = content.begin("", tokens)
        assert content.advance(writer, size) and content.advance(writer, size, snapshot=True)
        cache.release(writer.holding)
        cache.check([])
    assert cache.snapshots.num_held == 8
    resuming = content.begin("", first)
    assert resuming.computed == size
    for tokens in others[:3]:
        cache.release(content.begin("", tokens).holding)
    for tokens in others[3:]:
        writer = content.begin("", tokens)
        assert content.advance(writer, size) and content.advance(writer, size, snapshot=True)
        cache.release(writer.holding)
        cache.check([resuming.holding])
    assert cache.snapshots.num_held == 8
    assert [cache.match(Root(), tokens) for tokens in (first, *others)] == [4, 0, 0, 4, 4, 4]
    assert content.advance(resuming, 4)


def test_a_small_pool_has_room_for_one_snapshot() -> None:
    cache = Content(6, 4, [FULL, STATE]).cache
    assert cache.snapshots.max_blocks == cache.snapshots.state_blocks == 2


def test_a_group_that_writes_ahead_has_blocks_for_it() -> None:
    cache = KVCache(32, 4, [FULL, replace(FULL, ahead=3)])
    holding, _ = cache.attach(Root(), list(range(9)))
    assert cache.count_needed(holding, 0, 4) == 1 + 2
    cache.grow(holding, 0, 4, 0)
    assert [len(table) for table in holding.tables] == [1, 2]
    assert cache.count_needed(holding, 4, 5) == 1
    assert cache.blocks_to(9) == 3 + 3
    cache.release(holding)


def test_a_public_beginning_is_shared_and_the_rest_is_not() -> None:
    content = Content(32, 4, [FULL])
    cache, tokens = content.cache, list(range(13))
    for root in (Root("a", 6), Root("b", 6)):
        holding, hit = cache.attach(root, tokens)
        cache.grow(holding, hit, 12, content.plan)
        cache.insert(holding, tokens, 12)
        cache.release(holding)
        assert hit == (0 if root.salt == "a" else 4)
    assert [cache.match(root, tokens) for root in (Root("a", 6), Root("c", 6), Root(), Root("a"))] == [12, 4, 4, 0]
    assert cache.match(Root("a", 6, adapter="x"), tokens) == 0
