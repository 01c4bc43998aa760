"""Prefixes that a started plan computes: the next plan reads them, and nothing stays of a plan that failed."""

from __future__ import annotations

import pytest

from penstock.cache.group import Group
from tests.engine.stage import FULL, Stage, window
from tests.engine.test_faults import Scripted, ends

TEXT = list(range(1, 33))
GROUPS = [(FULL,), (window(9),), (FULL, window(9))]


def stage_of(groups: tuple[Group, ...], count: int = 5, max_tokens: int = 3, **options: object) -> Stage:
    stage = Stage(*groups, num_blocks=200, overlap=1, **options)  # type: ignore[arg-type]
    for last in range(count):
        stage.add([*TEXT, 100 + last], max_tokens=max_tokens)
    return stage


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("lazy", [True, False])
def test_the_next_plan_reads_what_a_started_one_computes(groups: tuple[Group, ...], lazy: bool) -> None:
    stage = stage_of(groups, lazy=lazy)
    stage.step()
    first, second = stage.plans[:2]
    assert [len(plan.admissions) for plan in (first, second)] == [1, 4], "started before the first was committed"
    assert sorted(row.start for row in second.rows if row.count == 1)[:4] == [32] * 4
    stage.run()
    assert stage.stats.num_computed_tokens == 33 + 4 + 5 * 2


def test_rows_of_one_plan_do_not_read_each_other() -> None:
    stage = stage_of((FULL,), max_num_batched_tokens=40)
    plan = stage.scheduler.schedule()
    assert plan is not None and [admission.request.id for admission in plan.admissions] == ["r1"]


def test_a_prompt_in_chunks_is_awaited_to_its_last_plan() -> None:
    stage = stage_of((FULL,), max_num_batched_tokens=12)
    stage.step(2)
    assert stage.counts()[:3] == [[12], [12], [9]]
    stage.run()
    assert stage.stats.num_cached_tokens == 4 * 32


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("fault", ["before", "middle"])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("lazy", [True, False])
def test_a_failed_plan_leaves_nothing_uncomputed(
    groups: tuple[Group, ...], fault: str, number: int, lazy: bool
) -> None:
    stage = stage_of(groups, lazy=lazy, faults=Scripted({number: fault}))
    stage.add(40, max_tokens=3)
    stage.step(number + 1)
    if number == 0:
        assert not list(stage.cache.tree.nodes()), "what both started plans put there is out again"
        assert not stage.scheduler.roster.running, "whoever relied on it begins anew"
    stage.run()
    assert "error" not in ends(stage).values() or len(stage.plans[number].rows) == 1


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("aborted", [False, True])
def test_a_row_that_fails_takes_its_prefix_back(groups: tuple[Group, ...], aborted: bool) -> None:
    """Those who read it in the plan after compute it themselves."""
    stage = Stage(*groups, num_blocks=200, overlap=1, faults=Scripted({}, {(0, 0)}))
    requests = [stage.add([*TEXT, 100 + last], max_tokens=3) for last in range(4)]
    if aborted:
        plan = stage.scheduler.schedule()
        assert plan is not None
        ticket = stage.start(plan)
        stage.abort(requests[0])
        stage.engine._started.append((plan, ticket))
    stage.run()
    assert ends(stage) == {"r1": "abort" if aborted else "error", "r2": "length", "r3": "length", "r4": "length"}


@pytest.mark.parametrize("groups", GROUPS)
def test_the_prefix_of_one_that_was_aborted_in_flight_is_good(groups: tuple[Group, ...]) -> None:
    stage = Stage(*groups, num_blocks=200, overlap=1)
    requests = [stage.add([*TEXT, 100 + last], max_tokens=3) for last in range(3)]
    plan = stage.scheduler.schedule()
    assert plan is not None
    stage.engine._started.append((plan, stage.start(plan)))
    stage.abort(requests[0])
    stage.run()
    assert stage.stats.num_computed_tokens == 33 + 2 + 2 * 2


def test_who_failed_and_was_admitted_anew_is_found_out() -> None:
    """Each failed plan would void the one after it, for ever, if nobody in it were suspected."""
    stage = Stage(window(1), num_blocks=6, block_size=3, max_num_batched_tokens=8, overlap=1)
    request = stage.add(14, max_tokens=4)
    stage.device.faults.poison.add(request.id)
    plan = stage.scheduler.schedule()
    assert plan is not None
    stage.engine._started.append((plan, stage.start(plan)))
    stage.scheduler._preemption.preempt(stage.sequences(request)[0])
    stage.run(50)
    assert ends(stage) == {request.id: "error"}
