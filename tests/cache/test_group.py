"""Layers are grouped so that blocks of all groups have equal bytes and little padding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.group import StateSpec, group_layers
from tests.simulation.effort import effort

FULL = StateSpec("full", bytes_per_position=8)
WINDOW = StateSpec("window", bytes_per_position=8, window=512)
NARROW = StateSpec("full", bytes_per_position=3)
STATE = StateSpec("recurrent", num_rows=25, row_bytes=4)
WIDE = StateSpec("recurrent", num_rows=3, row_bytes=700)


def test_equal_layers_form_one_group() -> None:
    grouping = group_layers([FULL] * 30, 16)
    assert [group.layers for group in grouping.groups] == [tuple(range(30))]
    assert (grouping.block_bytes, grouping.groups[0].part_bytes) == (8 * 16 * 30, 8 * 16)


def test_alternating_windows_are_cut_into_groups_of_equal_size() -> None:
    """Five windows to one full layer: as in Gemma 3. Without cuts the full group's blocks would be 80 % padding."""
    states = [FULL if layer % 6 == 5 else WINDOW for layer in range(18)]
    grouping = group_layers(states, 16)
    assert grouping.block_bytes // grouping.groups[0].part_bytes == 3
    assert [len(group.layers) for group in grouping.groups] == [3] * 6
    assert [group.spec.kind for group in grouping.groups] == ["window"] * 5 + ["full"]
    assert grouping.block_bytes == 8 * 16 * 3


def test_layers_without_state_are_in_no_group() -> None:
    assert group_layers([None] * 4, 16).groups == ()
    grouping = group_layers([None, FULL, None, FULL], 16)
    assert [group.layers for group in grouping.groups] == [(1, 3)]


def test_a_state_fills_as_many_blocks_as_it_needs() -> None:
    grouping = group_layers([FULL, STATE, STATE], 4)
    assert grouping.block_bytes == 32
    assert [(group.spec.kind, group.blocks_per_state) for group in grouping.groups] == [("full", 1), ("recurrent", 7)]
    alone = group_layers([STATE] * 3, 4)
    assert (alone.block_bytes, alone.groups[0].blocks_per_state) == (100, 3)


def test_specs_that_differ_are_never_mixed() -> None:
    other = StateSpec("window", bytes_per_position=8, window=64)
    groups = group_layers([WINDOW, other, WINDOW, other], 16).groups
    assert {group.layers for group in groups} == {(0, 2), (1, 3)}


@effort(100)
@given(
    kinds=st.lists(st.sampled_from([None, FULL, WINDOW, NARROW, STATE, WIDE]), min_size=1, max_size=40),
    size=st.integers(1, 32),
)
def test_every_layer_with_state_is_in_exactly_one_group(kinds: list[StateSpec | None], size: int) -> None:
    grouping = group_layers(kinds, size)
    layers = sorted(layer for group in grouping.groups for layer in group.layers)
    assert layers == [layer for layer, spec in enumerate(kinds) if spec is not None]
    for group in grouping.groups:
        assert all(kinds[layer] == group.spec for layer in group.layers)
        if group.spec.kind == "recurrent":
            rows_per_block = grouping.block_bytes // group.spec.row_bytes
            assert group.blocks_per_state * rows_per_block >= group.spec.num_rows * len(group.layers)
            assert group.part_bytes == group.spec.bytes_per_state
        else:
            assert group.part_bytes == group.spec.bytes_per_position * size
            assert group.part_bytes * len(group.layers) <= grouping.block_bytes


def test_a_block_holds_at_least_one_row() -> None:
    """Rows of 700 bytes beside two layers of 32: no row straddles two blocks."""
    grouping = group_layers([FULL, WIDE, FULL, WIDE], 4)
    assert grouping.block_bytes == 22 * 32
    assert [group.blocks_per_state for group in grouping.groups] == [1, 6]
    narrow = group_layers([FULL, StateSpec("recurrent", num_rows=3, row_bytes=20)], 4)
    assert (narrow.block_bytes, narrow.groups[1].blocks_per_state) == (32, 3)


def _window(width: int) -> StateSpec:
    return StateSpec("window", bytes_per_position=width, window=512)


def _full(width: int) -> StateSpec:
    return StateSpec("full", bytes_per_position=width)


MIXED = {
    "8B": ([_full(4096)] * 32, 1, 1.00),
    "8B and an EAGLE layer": ([_full(4096)] * 33, 1, 1.00),
    "8B and a 1B draft": ([_full(4096)] * 32 + [_full(2048)] * 16, 5, 1.00),
    "8B and SmolLM2 135M": ([_full(4096)] * 32 + [_full(768)] * 30, 5, 1.06),
    "1.7B and SmolLM2 135M": ([_full(8192)] * 24 + [_full(768)] * 30, 9, 1.01),
    "Gemma 3 270M": (([_window(1024)] * 5 + [_full(1024)]) * 3, 6, 1.00),
}


@pytest.mark.parametrize(("states", "num_groups", "ratio"), MIXED.values(), ids=MIXED)
def test_layers_of_different_width_waste_little(states: list[StateSpec], num_groups: int, ratio: float) -> None:
    grouping = group_layers(states, 16)
    needed = sum(state.bytes_per_position for state in states) * 16
    assert len(grouping.groups) == num_groups
    assert round(num_groups * grouping.block_bytes / needed, 2) == ratio
