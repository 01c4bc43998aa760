"""State specs against brute force over single positions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.group import StateSpec
from tests.simulation.effort import effort

FULL = StateSpec("full", bytes_per_position=1)
RECURRENT = StateSpec("recurrent", num_rows=1, row_bytes=1)


def window(width: int) -> StateSpec:
    return StateSpec("window", bytes_per_position=1, window=width)


def seen(spec: StateSpec, position: int) -> range:
    """The positions that a query reads, by definition."""
    first = 0 if spec.kind == "full" else position - spec.window + 1
    return range(max(0, first), position + 1)


@pytest.mark.parametrize("spec", [FULL, window(1), window(2), window(7)])
def test_first_needed_is_the_first_that_any_later_query_reads(spec: StateSpec) -> None:
    for position in range(30):
        assert spec.find_first_needed(position) == min(
            min(seen(spec, later)) for later in range(position, position + 20)
        )


@effort(200)
@given(present=st.lists(st.booleans(), max_size=12), size=st.integers(1, 6), width=st.integers(0, 20))
def test_usable_prefixes_are_those_whose_next_query_finds_all_it_reads(
    present: list[bool], size: int, width: int
) -> None:
    spec = window(width) if width else FULL
    expected = []
    for blocks in range(1, len(present) + 1):
        resume = blocks * size
        expected.append(all(present[position // size] for position in seen(spec, resume) if position < resume))
    assert spec.find_resumable(present, size) == expected


@given(present=st.lists(st.booleans(), max_size=12))
@effort(30)
def test_a_recurrent_state_resumes_only_where_a_snapshot_is(present: list[bool]) -> None:
    assert RECURRENT.find_resumable(present, 4) == present


@effort(100)
@given(length=st.integers(1, 60), chunk=st.integers(1, 20), size=st.integers(1, 8), width=st.integers(1, 20))
def test_max_blocks_covers_every_step_of_a_window(length: int, chunk: int, size: int, width: int) -> None:
    spec, most = window(width), 0
    for start in range(0, length, chunk):
        end = min(length, start + chunk)
        most = max(most, -(-end // size) - spec.find_first_needed(start) // size)
    assert most <= spec.max_blocks(length, chunk, size) <= -(-length // size)


def test_max_blocks_of_full_attention_is_the_whole_length() -> None:
    assert [FULL.max_blocks(length, 1, 4) for length in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
