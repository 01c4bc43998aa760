"""Paths that are kept: a session's until its time or the room runs out, others by their priority."""

from __future__ import annotations

import pytest

from penstock.cache.group import Group
from penstock.engine.executor import EraseSession, SaveSession
from tests.engine.stage import FULL, STATE, Stage, window
from tests.simulation.keeping import FakeStore

TEXT = list(range(1, 33))
LAST = [*TEXT, 100]


def crowd(stage: Stage, count: int = 12) -> None:
    """Prompts that fill the cache again and again."""
    for _ in range(count):
        stage.add(36, max_tokens=1)
        stage.run()


def find_hit(stage: Stage) -> int:
    stage.add([*TEXT, 200], max_tokens=1)
    stage.run()
    return stage.deltas[-1].num_cached_tokens


def make(*groups: Group, num_blocks: int = 40, store: FakeStore | None = None) -> tuple[Stage, list[float]]:
    stage, now = Stage(*groups, num_blocks=num_blocks, store=store), [0.0]
    stage.scheduler.roster.sessions._clock = lambda: now[0]
    return stage, now


@pytest.mark.parametrize("groups", [(FULL,), (window(9),), (FULL, window(9)), (FULL, STATE), (FULL, window(9), STATE)])
def test_a_session_outlives_a_crowd_until_its_time_is_over(groups: tuple[Group, ...]) -> None:
    stage, now = make(*groups, num_blocks=44 * len(groups))
    stage.add(LAST, max_tokens=1, session="s", session_s=60.0)
    stage.run()
    crowd(stage)
    assert find_hit(stage) == 32 and len(stage.scheduler.roster.sessions) == 1
    crowd(stage)
    now[0] = 61.0
    crowd(stage, 16)
    assert len(stage.scheduler.roster.sessions) == 0 and find_hit(stage) == 0


def test_without_a_session_the_crowd_takes_its_place() -> None:
    stage, _ = make()
    stage.add(LAST, max_tokens=1)
    stage.run()
    crowd(stage)
    assert find_hit(stage) == 0


def test_a_higher_priority_is_evicted_later() -> None:
    stage, _ = make()
    stage.add(LAST, max_tokens=1, cache_priority=5)
    stage.run()
    crowd(stage)
    assert find_hit(stage) == 32


def test_priorities_give_way_where_nothing_else_is_left() -> None:
    """A request that needs the whole cache gets it."""
    stage, _ = make(num_blocks=16)
    stage.add(LAST, max_tokens=1, session="s", session_s=60.0, cache_priority=100)
    stage.run()
    stage.add(60, max_tokens=4)
    stage.run()
    assert stage.finished() == ["r1", "r2"]


def test_a_session_goes_on_and_moves_its_path() -> None:
    stage, _ = make()
    for length in (16, 32):
        stage.add([*TEXT[:length], 100], max_tokens=1, session="s", session_s=60.0)
        stage.run()
    crowd(stage)
    assert find_hit(stage) == 32
    kept = [node for node in stage.cache.tree.nodes() if node.kept]
    assert len(kept) == 9 and {node.kept for node in kept} == {1}


def test_sessions_of_two_tenants_have_one_name_each() -> None:
    stage, _ = make()
    for tenant in ("a", "b"):
        stage.add([*TEXT[:12], 100], max_tokens=1, session="s", session_s=60.0, tenant=tenant, salt=tenant)
        stage.run()
    assert len(stage.scheduler.roster.sessions) == 2
    assert stage.engine.control(EraseSession("c", "s")).values == {"num_positions": 0}
    assert stage.engine.control(EraseSession("a", "s")).values == {"num_positions": 12}
    assert len(stage.scheduler.roster.sessions) == 1


def test_the_oldest_sessions_go_beyond_half_of_the_cache() -> None:
    stage, _ = make()
    for _ in range(6):
        stage.add(21, max_tokens=1, session=f"s{stage.num_added}", session_s=60.0)
        stage.run()
    assert len(stage.scheduler.roster.sessions) == 4, "5 blocks each, of 40"


def test_an_erased_session_is_evicted_as_any_other() -> None:
    stage, _ = make()
    stage.add(LAST, max_tokens=1, session="s", session_s=60.0)
    stage.run()
    stage.engine.control(EraseSession("", "s"))
    crowd(stage)
    assert find_hit(stage) == 0 and not any(node.kept for node in stage.cache.tree.nodes())


def test_a_saved_session_is_in_the_store_at_once() -> None:
    """While others run, and although its blocks are in use by one of them."""
    store = FakeStore(0)
    stage, _ = make(store=store)
    stage.add(LAST, max_tokens=1, session="s", session_s=60.0)
    stage.step()
    stage.add([*TEXT, 300], max_tokens=30)
    stage.step(2)
    store.kept.clear()
    answer = stage.engine.control(SaveSession("", "s"))
    assert answer.values == {"num_positions": 32, "tokens": TEXT, "loras": [], "salt": ""} and len(store.kept) == 8
    stage.run()
    without, _ = make()
    assert without.engine.control(SaveSession("", "s")).values == {"num_positions": 0}
    without.add(LAST, max_tokens=1, session="s", session_s=60.0)
    without.run()
    assert "start with --kv-offloading-path" in str(without.engine.control(SaveSession("", "s")).error)
