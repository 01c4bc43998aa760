"""A drafting model drafts where tokens per second rise, its own time counted; elsewhere it rests and is tried again."""

from __future__ import annotations

import random

import pytest

from penstock.cache.group import Group, StateSpec
from penstock.cache.kv import KVCache
from penstock.engine.plan import Draft, Output, Plan, Result, Row, RowResult
from penstock.engine.scheduling.drafts.ahead import FIRST_REST
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.speculation import SpeculationController
from penstock.types import Request

MOST = 6


def model_line(count: int, drafter: str = "draft_model") -> tuple[Draft, ...]:
    return tuple(Draft(7, i - 1, drafter=drafter) for i in range(count))


class Machine:
    """Steps of `num_rows` sequences with scripted costs and acceptance."""

    def __init__(self, num_rows: int = 1, seed: int = 0) -> None:
        self.controller, self.num_rows, self.rng = SpeculationController(MOST), num_rows, random.Random(seed)
        self.acceptance, self.token_s, self.draft_s = 0.8, 0.05, 0.05
        self.lines = [0] * num_rows  # draft tokens that wait
        self.seconds = self.num_tokens = 0.0

    def step(self) -> int:
        """Run a step; returns how many tokens ahead were drafted in it."""
        drafts = [[Draft(7, i - 1, self.acceptance) for i in range(count)] for count in self.lines]
        counts = self.controller.choose(drafts, self.num_rows, 4096, False)
        rows, results = [], []
        for count in counts:
            right = next((i for i in range(count) if self.rng.random() >= self.acceptance), count)
            rows.append(Row(0, 0, 1 + count, Output.SAMPLE, draft=model_line(count)))
            results.append(RowResult((7,) * right + (8,)))
            self.num_tokens += right + 1
        ahead = self.controller.choose_ahead(self.num_rows)
        plan = Plan(0, tuple(rows), ahead=ahead)
        step_s = 1.0 + self.token_s * sum(counts)
        draft_s = self.draft_s * ahead * self.num_rows
        self.seconds += step_s + draft_s
        self.controller.note(plan, Result(0, results, step_s=step_s, draft_s=draft_s))
        self.lines = [ahead] * self.num_rows
        return ahead

    def run(self, count: int) -> list[int]:
        return [self.step() for _ in range(count)]


def test_it_drafts_where_that_pays() -> None:
    machine = Machine()
    steps = machine.run(300)
    assert steps[:3] == [0, 0, 0]  # plain steps are measured first
    assert min(steps[40:100]) >= 3 and machine.num_tokens / machine.seconds > 2


@pytest.mark.parametrize(("acceptance", "draft_s"), [(0.8, 1.0), (0.05, 0.2)], ids=["too dear", "too often wrong"])
def test_it_rests_where_it_does_not(acceptance: float, draft_s: float) -> None:
    machine = Machine()
    machine.acceptance, machine.draft_s = acceptance, draft_s
    machine.run(1000)
    before = machine.seconds, machine.num_tokens
    assert sum(map(bool, machine.run(4000))) < 40
    assert (machine.num_tokens - before[1]) / (machine.seconds - before[0]) > 0.98


def test_it_is_tried_again_after_ever_longer_rests() -> None:
    machine = Machine()
    machine.acceptance, machine.draft_s = 0.0, 0.5
    steps = machine.run(600)
    tried = [i for i, ahead in enumerate(steps) if ahead]
    rests = [b - a - 1 for a, b in zip(tried, tried[1:]) if b - a > 1]
    assert rests == [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST, 8 * FIRST_REST]
    machine.acceptance, machine.draft_s = 0.95, 0.02
    assert max(machine.run(1500)[-50:]) >= 3  # the text has changed: it drafts again


@pytest.mark.parametrize("num_rows", [16, 33])
def test_many_sequences_draft_what_their_machine_bears(num_rows: int) -> None:
    """A CPU's tokens cost about a share of the step each, and a GPU's next to nothing: no number decides, but both."""
    cpu = Machine(num_rows)
    cpu.token_s, cpu.draft_s = 0.9 / num_rows, 0.5 / num_rows
    cpu.run(400)
    before = cpu.seconds, cpu.num_tokens
    assert sum(map(bool, cpu.run(4000))) < 40
    assert (cpu.num_tokens - before[1]) / (cpu.seconds - before[0]) > 0.98 * num_rows
    gpu = Machine(num_rows)
    gpu.token_s, gpu.draft_s = 0.0002, 0.0005
    assert min(gpu.run(100)[40:]) >= 4 and gpu.num_tokens / gpu.seconds > 2 * num_rows


def test_a_length_that_could_not_pay_is_not_tried() -> None:
    """Prompts told what tokens cost: 33 more than double the step."""
    machine = Machine(33)
    for tokens, seconds in ((64, 2.1), (512, 17.0)):
        for _ in range(3):
            machine.controller.note(Plan(0, (Row(0, 0, tokens, Output.SAMPLE),)), Result(0, [7], step_s=seconds))
    assert max(machine.run(100)) == 0


def test_without_a_drafting_model_nothing_is_asked_for() -> None:
    controller = SpeculationController()
    assert [controller.choose_ahead(1) for _ in range(5)] == [0] * 5


@pytest.mark.parametrize("drafter", ["grammar", "prediction", "corpus", "ngram"])
def test_a_text_s_drafts_say_nothing_about_the_model(drafter: str) -> None:
    """Breaks when a schema's forced text makes a model that is never right look as if it always were."""
    machine = Machine()
    machine.acceptance, machine.draft_s = 0.0, 0.5
    for _ in range(200):
        machine.step()
        row = Row(0, 0, 5, Output.SAMPLE, draft=model_line(4, drafter))
        result = Result(0, [RowResult((7, 7, 7, 7, 8))], step_s=1.2)
        machine.controller.note(Plan(0, (row,)), result)
    ahead = machine.controller.ahead
    assert sum(ahead._accepted) == 0 and sum(ahead._judged) > 0
    assert sum(map(bool, machine.run(400))) < 20


def test_time_of_rows_that_a_text_drafts_for_is_no_model_s_time() -> None:
    controller = SpeculationController(MOST)
    for _ in range(8):
        rows = (Row(0, 0, 1, Output.SAMPLE), Row(1, 0, 1, Output.SAMPLE))
        results = [RowResult((7,), draft=model_line(4, "ngram")), RowResult((7,), draft=model_line(4))]
        controller.note(Plan(0, rows, ahead=4), Result(0, results, step_s=1.0, draft_s=0.1))
    assert controller.ahead.draft_costs.estimate(2, 8) is None


def test_the_price_of_a_draft_is_its_time_in_tokens() -> None:
    machine = Machine()
    machine.draft_s = 0.1
    while not machine.step() or machine.controller.ahead.is_trial:
        assert machine.controller.ahead.price == 0
    ahead = machine.lines[0]
    assert machine.controller.ahead.price == pytest.approx(0.1 * ahead)


def test_every_step_has_blocks_for_the_places_ahead() -> None:
    """The fast path of decoding counts them, too."""
    ahead, size = 3, 4
    group = Group(StateSpec("full", 8), (0,), 32, ahead=ahead)
    scheduler = Scheduler(KVCache(64, size, [group]), max_num_seqs=2, max_num_batched_tokens=16)
    scheduler.add(Request(id="a", tokens=(1, 2, 3, 4, 5), max_tokens=40))
    num_blocks = num_fast = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        row = plan.rows[0]
        num_blocks = max([num_blocks, *(index + 1 for index in (row.blocks[0] if row.blocks else ()))])
        num_fast += not row.blocks
        assert num_blocks * size >= row.start + row.count + ahead
        scheduler.commit(plan, Result(plan.number, [RowResult((7,))]))
        scheduler.check()
    assert num_fast > 20
