"""Prefixes that come back from a store: what is saved and when, and what follows where a block is lost."""

from __future__ import annotations

import pytest

from penstock.cache.group import Group
from tests.engine.stage import FULL, STATE, Stage, window
from tests.simulation.keeping import FakeStore

TEXT = list(range(1, 33))
KINDS = [(FULL,), (window(9),), (FULL, window(9)), (FULL, STATE), (STATE,), (FULL, window(9), STATE)]


def filled(*groups: Group) -> FakeStore:
    """A store that an engine of before has left."""
    store = FakeStore(0)
    stage = Stage(*groups, store=store, num_blocks=200)
    stage.add([*TEXT, 100], max_tokens=1)
    stage.run()
    assert store.kept
    return store


@pytest.mark.parametrize("groups", KINDS)
@pytest.mark.parametrize("overlap", [0, 2])
def test_another_engine_goes_on_where_the_first_was(groups: tuple[Group, ...], overlap: int) -> None:
    stage = Stage(*groups, store=filled(*groups), num_blocks=200, overlap=overlap)
    for last in range(3):
        stage.add([*TEXT, 100 + last], max_tokens=1)
    stage.run()
    assert stage.stats.num_computed_tokens == 3
    assert stage.stats.num_restored_tokens == 32 and stage.stats.num_cached_tokens == 96
    assert {delta.num_cached_tokens for delta in stage.deltas} == {32}


def test_a_window_restores_no_more_than_it_needs() -> None:
    groups = (window(9),)
    stage = Stage(*groups, store=filled(*groups), num_blocks=200)
    stage.add([*TEXT, 100], max_tokens=1)
    stage.run()
    assert sum(len(plan.loads) for plan in stage.plans) == 2


def test_a_lost_block_is_computed_anew_and_ends_nobody() -> None:
    store = filled(FULL)
    store.loss_rate = 1.0
    stage = Stage(store=store, overlap=2)
    other = stage.add(5, max_tokens=12)
    stage.step(4)
    stage.add([*TEXT, 100], max_tokens=2)
    stage.run()
    assert stage.stats.num_lost_restores > 0 and stage.stats.num_failed == 0
    assert sorted(stage.finished()) == [other.id, "r2"]
    assert [delta for delta in stage.deltas if delta.request_id == "r2"][0].num_cached_tokens == 0


def test_what_a_started_plan_computes_is_not_saved_yet() -> None:
    """The first request goes while two of its plans have not ended, and another one's plans follow."""
    store = FakeStore(0)
    stage = Stage(store=store, overlap=2, max_num_batched_tokens=16)
    first = stage.add(64, max_tokens=1)
    stage.engine.start()
    stage.engine.start()
    stage.abort(first)
    stage.add(20, max_tokens=6)
    stage.engine.start()
    assert not any(plan.saves for plan in stage.plans), "its blocks are idle, and hold nothing yet"
    stage.run()
    assert len(store.kept) >= 8, "later they are"


def test_saves_beside_rows_are_few_and_all_come_in_the_end() -> None:
    store = FakeStore(0)
    stage = Stage(store=store, num_blocks=200)
    stage.add(120, max_tokens=1)
    stage.add(3, max_tokens=9)
    stage.run()
    beside = [sum(len(save.blocks) for save in plan.saves) for plan in stage.plans if plan.rows]
    assert max(beside) == 8 and store.num_saved >= 30


def test_a_preempted_answer_comes_back_from_the_store() -> None:
    """Its blocks were saved and evicted while it waited."""
    store = FakeStore(0)
    stage = Stage(store=store, num_blocks=14, max_num_batched_tokens=16)
    for _ in range(3):
        stage.add(16, max_tokens=24)
    stage.run()
    assert stage.stats.num_preemptions > 0 and stage.stats.num_restored_tokens > 0


def test_no_room_for_the_rest_of_a_restored_prefix() -> None:
    """What was to be loaded is given back, and the request runs alone in the whole cache."""
    stage = Stage(store=filled(FULL), num_blocks=10)
    other = stage.add(8, max_tokens=16)
    stage.step()
    stage.add([*TEXT, 100], max_tokens=4)
    stage.run()
    assert stage.finished() == [other.id, "r2"]


def test_forgotten_prefixes_are_not_restored() -> None:
    stage = Stage(store=filled(FULL))
    stage.engine.forget_prefixes()
    stage.add([*TEXT, 100], max_tokens=1)
    stage.run()
    assert stage.stats.num_computed_tokens == 33


def test_adapters_have_names_only_once_their_files_are_known() -> None:
    from penstock.cache.radix import Root
    from penstock.cache.store import BlockNames

    known: dict[str, str] = {}
    names = BlockNames("model", known.get)
    assert names.start(Root(adapter="1*1.0")) is None and names.start(Root()) is not None
    known["1*1.0"] = known["2*1.0"] = "files"
    assert names.start(Root(adapter="1*1.0")) == names.start(Root(adapter="2*1.0")) != names.start(Root())
    assert names.start(Root(salt="a")) != names.start(Root(salt="b"))
    assert BlockNames("other").start(Root()) != names.start(Root())
