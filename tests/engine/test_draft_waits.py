"""On a device that knows no count of its own: who waits while drafts are verified."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cache.group import Group, StateSpec
from penstock.cache.kv import KVCache
from penstock.engine.plan import Draft, Output, Plan, Result, Row, RowResult
from penstock.engine.scheduling.drafts.waits import DraftWaits
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.speculation import SpeculationController
from penstock.types import Request

LINE = tuple(Draft(7, place - 1, 0.9) for place in range(3))


class Device:
    """Plans that the test ends one after the other; row 0 is that of "drafts", whose results bring drafts if asked."""

    def __init__(self, **options: Any) -> None:
        cache = KVCache(64, 4, [Group(StateSpec("full", 8), (0,), 32)])
        self.scheduler = Scheduler(cache, max_num_seqs=4, max_num_batched_tokens=64, exact_starts=True, **options)
        for name in ("drafts", "plain"):
            self.scheduler.add(Request(id=name, tokens=(1, 2, 3), max_tokens=40))
        self.plans: list[Plan] = []
        self.names: dict[int, str] = {}

    def start(self) -> dict[str, Row]:
        """Start a plan; returns its rows by request."""
        plan = self.scheduler.schedule()
        if plan is None:
            return {}
        self.plans.append(plan)
        self.names |= {one.row: one.request.id for one in plan.admissions}
        return {self.names[row.row]: row for row in plan.rows}

    def end(self, drafts: bool, *, num_accepted: int = 0, step_s: float = 0.0, idle_s: float = 0.0) -> None:
        """End the oldest plan."""
        plan, results = self.plans.pop(0), []
        for row in plan.rows:
            line = LINE if drafts and self.names[row.row] == "drafts" else ()
            results.append(RowResult((7,) * min(num_accepted, len(row.draft)) + (9,), draft=line))
        self.scheduler.commit(plan, Result(plan.number, results, step_s=step_s, idle_s=idle_s))
        self.scheduler.check()


def test_a_row_waits_for_its_own_plan_and_no_other() -> None:
    device = Device()
    assert set(device.start()) == {"drafts", "plain"}  # the prompts
    device.end(drafts=False)
    assert set(device.start()) == set(device.start()) == {"drafts", "plain"}  # one ahead of the other
    device.end(drafts=True)
    assert set(device.start()) == {"plain"}  # what comes of the plan under way would make the draft stale
    device.end(drafts=True)
    found = device.start()
    assert set(found) == {"drafts", "plain"} and found["drafts"].draft == LINE
    assert found["drafts"].start == 3 + 2 and found["plain"].start == 3 + 3
    assert set(device.start()) == {"plain"}  # while the draft is verified
    device.end(drafts=False)
    assert set(device.start()) == {"plain"}
    device.end(drafts=False, num_accepted=2)
    found = device.start()
    assert set(found) == {"drafts", "plain"} and found["drafts"].start == 3 + 2 + 3 and not found["drafts"].draft


def test_a_draft_goes_when_its_row_gets_a_token_without_another() -> None:
    """Breaks when the fast path leaves it: it would be verified a place too late."""
    device = Device()
    device.start()
    device.end(drafts=False)
    device.start()
    device.start()
    device.end(drafts=True)
    device.end(drafts=False)
    assert not device.start()["drafts"].draft


def measured(idle_s: float, step_s: float = 0.005) -> DraftWaits:
    waits = DraftWaits()
    plan = Plan(0, (Row(0, 5, 1, Output.SAMPLE),))
    for _ in range(30):
        waits.note(plan, Result(0, [7], step_s=step_s, idle_s=idle_s), was_alone=True)
        waits.note(plan, Result(0, [7], step_s=step_s), was_alone=False)
    return waits


@pytest.mark.parametrize(
    ("num_rows", "gains", "idle_s", "expected"),
    [
        (1, [1.5], 0.001, True),  # nobody else is there
        (32, [2.5], 0.001, False),  # one of 32 costs the others a fifth of their tokens
        (32, [2.5], 0.00001, True),  # but not if the host is as fast as this
        (32, [2.5] * 32, 0.001, True),  # all in every step, or half of them in each
        (32, [2.5] * 32, 0.02, False),
        (32, [], 0.001, False),
    ],
)
def test_who_waits_is_measured(num_rows: int, gains: list[float], idle_s: float, expected: bool) -> None:
    assert measured(idle_s).choose(num_rows, gains) is expected
    assert DraftWaits().choose(num_rows, gains)  # before anything is known: to measure it


@pytest.mark.parametrize(("idle_s", "others"), [(0.004, {"plain"}), (0.0, set())], ids=["dear", "free"])
def test_the_scheduler_asks(idle_s: float, others: set[str]) -> None:
    device = Device(speculation=SpeculationController())
    device.start()
    device.end(drafts=False)
    for _ in range(8):
        device.start()
        device.end(drafts=False, step_s=0.005, idle_s=idle_s)
    assert device.start() and device.start()
    device.end(drafts=True, step_s=0.005)
    assert set(device.start()) == others


def test_a_draft_must_be_worth_the_step_that_its_row_misses() -> None:
    device = Device(speculation=SpeculationController())
    device.scheduler._speculation.all_wait = lambda num_rows, gains: False  # type: ignore[union-attr, method-assign]
    device.start()
    device.end(drafts=True)
    assert device.start()["drafts"].draft == LINE  # 2.4 tokens
    device.end(drafts=True)
    (sequence,) = [s for s in device.scheduler.roster.running if s.request.id == "drafts"]
    sequence.draft = list(LINE[:1])  # 0.9
    assert not device.start()["drafts"].draft


def test_a_draft_that_does_not_pay_makes_nobody_wait() -> None:
    """Breaks when rows wait for a draft that the controller then drops: random text would lose its overlap."""
    device = Device(speculation=SpeculationController())
    controller: Any = device.scheduler._speculation
    controller.choose = lambda drafts, num_rows, room, is_mixed: [0] * len(drafts)
    device.start()
    device.end(drafts=False)
    for _ in range(6):
        assert set(device.start()) == set(device.start()) == {"drafts", "plain"}
        device.end(drafts=True)
        device.end(drafts=True)
