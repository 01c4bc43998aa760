"""A look at the engine: counts that add up, a map that fits them, and nothing kept while nobody looks."""

from __future__ import annotations

import pytest

from penstock.cache.kv import KVCache
from penstock.engine.view import CACHED, EVICTED, FREE, HELD, MAX_CELLS, MAX_SHARE, SHARED, Viewer
from tests.engine.stage import Stage


def count(cells: bytes) -> dict[int, int]:
    return {kind: cells.count(kind) for kind in (FREE, HELD, CACHED, SHARED, EVICTED)}


def test_counts_and_map_agree_in_every_state() -> None:
    """Over a run with sharing, preemption and eviction."""
    stage = Stage(num_blocks=24)
    viewer = Viewer(stage.engine, clock=iter(range(10_000)).__next__)
    viewer._due_s = -1.0
    for number in range(6):
        stage.add(list(range(100 * (number % 3), 100 * (number % 3) + 16)), max_tokens=16)
    seen = set()
    while stage.engine.has_work:
        stage.step()
        viewer._due_s = -1.0  # draw each map
        blocks = viewer.describe_blocks()
        assert blocks.free + blocks.held + blocks.cached + blocks.shared == blocks.num == 24
        found = count(blocks.cells)
        assert sum(found.values()) == 24
        if not found[EVICTED]:
            assert (found[HELD], found[SHARED], found[CACHED]) == (blocks.held, blocks.shared, blocks.cached)
        seen |= {kind for kind, number in found.items() if number}
    assert seen == {FREE, HELD, CACHED, SHARED, EVICTED}


def test_rows_tell_how_far_they_are() -> None:
    stage = Stage(num_blocks=64, max_num_seqs=2, max_num_batched_tokens=8)
    ids = [stage.add(20, max_tokens=4).id for _ in range(3)]
    viewer = Viewer(stage.engine)
    stage.step()
    rows = {row.request_id: row for row in viewer.list_rows()}
    assert (rows[ids[0]].state, rows[ids[0]].computed, rows[ids[2]].state) == ("prefill", 8, "queued")
    states = set()
    while stage.engine.has_work:
        stage.step()
        for row in viewer.list_rows():
            states.add(row.state)
            assert 0 <= row.computed <= 24 and row.output <= 4
    assert {"prefill", "decode", "queued"} <= states


def test_nothing_is_kept_while_nobody_looks() -> None:
    stage = Stage(num_blocks=12)
    viewer, pool = Viewer(stage.engine), stage.scheduler.cache.pool
    assert pool.evictions is None
    viewer.describe_blocks()
    for _ in range(6):
        stage.add(24, max_tokens=2)
    stage.run()
    assert pool.evictions  # blocks of the first made room for the last
    blocks = viewer.describe_blocks()
    assert blocks.evicted >= len(viewer._evicted[-1]) > 0 and not pool.evictions
    viewer.stop()
    assert pool.evictions is None and not viewer._evicted and not viewer._cells


@pytest.mark.parametrize("num_blocks", [1, 7, 1999, 2000, 2001, 5000])
def test_a_map_has_a_bounded_size(num_blocks: int) -> None:
    stage = Stage(num_blocks=num_blocks)
    blocks = Viewer(stage.engine).describe_blocks()
    assert len(blocks.cells) == -(-num_blocks // blocks.blocks_per_cell) <= MAX_CELLS
    assert count(blocks.cells)[FREE] == len(blocks.cells)


def test_a_map_that_takes_long_is_drawn_rarely() -> None:
    """A drawing of 50 ms, as of a pool of a million blocks, is repeated after 10 s."""
    times = iter([100.0, 100.05, 100.5, 105.0, 110.049, 110.1, 110.15])
    stage = Stage(num_blocks=8)
    viewer = Viewer(stage.engine, clock=lambda: next(times))
    drawn: list[int] = []
    make_map = viewer._make_map

    def note_and_make(cache: KVCache, size: int) -> None:
        drawn.append(size)
        make_map(cache, size)

    viewer._make_map = note_and_make  # type: ignore[method-assign]
    for _ in range(5):
        viewer.describe_blocks()
    assert len(drawn) == 2 and MAX_SHARE == 0.005
