"""Steps and rows that fail: the cause is found, and nobody else notices."""

from __future__ import annotations

import pytest

from penstock.engine.plan import Plan
from penstock.types import BeamSearchParams
from tests.engine.stage import FULL, STATE, Stage, window
from tests.simulation.device import Work
from tests.simulation.faults import Faults


class Scripted(Faults):
    """Steps of these numbers fail, and rows of these plans."""

    def __init__(self, steps: dict[int, str], rows: set[tuple[int, int]] = frozenset()) -> None:  # type: ignore[assignment]
        super().__init__()
        self.steps = steps
        self.rows = rows

    def of_step(self, work: Work) -> str | None:
        return self.steps.get(work.plan.number)

    def of_row(self, plan: Plan, row: object) -> bool:
        return (plan.number, getattr(row, "row", -1)) in self.rows


def ends(stage: Stage) -> dict[str, str]:
    return {delta.request_id: delta.finish_reason for delta in stage.deltas if delta.finish_reason}


@pytest.mark.parametrize("fault", ["before", "middle"])
@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize("lazy", [True, False])
def test_a_step_that_fails_once_costs_time_only(fault: str, overlap: int, lazy: bool) -> None:
    stage = Stage(FULL, window(6), STATE, overlap=overlap, lazy=lazy, faults=Scripted({4: fault}))
    for length in (5, 9, 14):
        stage.add(length, max_tokens=8, n=2)
    stage.run()
    assert set(ends(stage).values()) == {"length"}
    assert stage.stats.num_failed_steps == 1
    assert stage.stats.num_preemptions == 0, "a failed step is no preemption"


def test_after_a_failure_each_runs_alone_until_it_is_past_it() -> None:
    stage = Stage(faults=Scripted({1: "middle"}))
    for length in (5, 9, 14):
        stage.add(length, max_tokens=4)
    stage.run()
    assert [len(counts) for counts in stage.counts()] == [3, 3, 1, 1, 1, 3, 3]


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_a_poisonous_request_ends_alone(overlap: int, caching: bool) -> None:
    faults = Faults(poison={"bad"})
    stage = Stage(overlap=overlap, faults=faults, caching=caching)
    stage.add(5, max_tokens=12)
    stage.add(7, max_tokens=12)
    stage.step(3)
    stage.add(6, id="bad", n=2)
    stage.add(9, max_tokens=4)
    stage.run()
    assert ends(stage) == {"r1": "length", "r2": "length", "bad": "error", "r4": "length"}
    errors = [delta for delta in stage.deltas if delta.finish_reason == "error"]
    assert [delta.error for delta in errors] == ["the step failed: middle"] * 2
    assert stage.stats.num_failed == 2


def test_a_row_that_fails_ends_alone() -> None:
    stage = Stage(overlap=1, faults=Scripted({}, {(2, 1)}))
    for _ in range(3):
        stage.add(5, max_tokens=6)
    stage.run()
    assert ends(stage) == {"r1": "length", "r2": "error", "r3": "length"}
    assert stage.stats.num_failed_steps == 0


def test_a_snapshot_of_a_failed_plan_is_not_kept() -> None:
    """The copy of the state may be garbage: whoever resumed from it would be wrong."""
    stage = Stage(FULL, STATE, max_num_batched_tokens=16, faults=Scripted({2: "middle"}))
    stage.add(list(range(40)), max_tokens=2)
    stage.add(3, max_tokens=9)
    stage.step(3)
    stage.add(list(range(40)), max_tokens=2)
    stage.run()
    assert set(ends(stage).values()) == {"length"}


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("budget", [1, 2, 3])
@pytest.mark.parametrize("number", range(3, 9))
def test_a_copy_that_travelled_in_a_failed_plan_is_not_relied_upon(overlap: int, budget: int, number: int) -> None:
    """Forked beams find no place in the plan that carries the copies of their states, and that plan fails."""
    stage = Stage(FULL, STATE, max_num_batched_tokens=budget, overlap=overlap, faults=Scripted({number: "before"}))
    stage.add(2, max_tokens=12)
    stage.add(2, max_tokens=5, beam=BeamSearchParams(beam_width=3, max_tokens=5))
    stage.run()


def test_results_of_plans_started_before_a_failure_are_void() -> None:
    stage = Stage(overlap=3, faults=Scripted({3: "before"}))
    stage.add(5, max_tokens=12)
    stage.add(6, max_tokens=12)
    stage.run()
    assert stage.device.tally.num_void > 0
    assert ends(stage) == {"r1": "length", "r2": "length"}


def test_a_suspect_needs_room_and_others_give_way() -> None:
    stage = Stage(window(30), num_blocks=12, caching=False, faults=Scripted({6: "middle"}))
    for length in (12, 12, 12):
        stage.add(length, max_tokens=24)
    stage.run()
    assert set(ends(stage).values()) == {"length"}
