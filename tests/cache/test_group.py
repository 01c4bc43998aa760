"""How layers are bundled into groups of equal block bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.group import group_layers
from penstock.cache.state import StateSpec
from tests.simulation.effort import effort

FULL = StateSpec("full", bytes_per_position=8)
WINDOW = StateSpec("window", bytes_per_position=8, window=512)
STATE = StateSpec("recurrent", bytes_per_state=100)


def test_equal_layers_form_one_group() -> None:
    grouping = group_layers([FULL] * 30, 16)
    assert [group.layers for group in grouping.groups] == [tuple(range(30))]
    assert (grouping.block_bytes, grouping.layers_per_block) == (8 * 16 * 30, 30)


def test_alternating_windows_are_cut_into_groups_of_equal_size() -> None:
    """Five windows to one full layer: as in Gemma 3. Without cuts the full group's blocks would be 80 % padding."""
    states = [FULL if layer % 6 == 5 else WINDOW for layer in range(18)]
    grouping = group_layers(states, 16)
    assert grouping.layers_per_block == 3
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
@given(kinds=st.lists(st.sampled_from([None, FULL, WINDOW, STATE]), min_size=1, max_size=40), size=st.integers(1, 32))
def test_every_layer_with_state_is_in_exactly_one_group(kinds: list[StateSpec | None], size: int) -> None:
    grouping = group_layers(kinds, size)
    layers = sorted(layer for group in grouping.groups for layer in group.layers)
    assert layers == [layer for layer, spec in enumerate(kinds) if spec is not None]
    for group in grouping.groups:
        assert all(kinds[layer] == group.spec for layer in group.layers)
        if group.spec.kind == "recurrent":
            assert group.blocks_per_state * grouping.block_bytes >= group.spec.bytes_per_state * len(group.layers)
        else:
            assert len(group.layers) <= grouping.layers_per_block
            assert group.spec.bytes_per_position * size * grouping.layers_per_block <= grouping.block_bytes
