"""The controller with a scripted clock: drafts are verified where they pay, and only there."""

from __future__ import annotations

import random

import pytest

from penstock.engine.plan import Draft, Output, Plan, Result, Row, RowResult
from penstock.engine.scheduling.speculation import MIN_CHANCE, RUNGS, SpeculationController
from penstock.engine.scheduling.step_costs import MIN_SAMPLES, StepCosts
from tests.engine.stage import Stage
from tests.simulation.forward import Drafting


def line(*chances: float) -> list[Draft]:
    return [Draft(7, place - 1, chance) for place, chance in enumerate(chances)]


def taught(cost: dict[tuple[int, int], float]) -> SpeculationController:
    """A controller that has seen steps of these (sequences, tokens)."""
    controller = SpeculationController()
    for (rows, tokens), seconds in cost.items():
        base, extra = divmod(tokens - rows, rows)
        for _ in range(MIN_SAMPLES):
            plan_rows = []
            for i in range(rows):
                count = base + (i < extra)
                plan_rows.append(Row(i, 5, 1 + count, Output.SAMPLE, draft=tuple(line(*[0.5] * count))))
            plan = Plan(0, tuple(plan_rows))
            controller.note(plan, Result(0, step_s=seconds))
    return controller


def test_verifies_what_costs_less_than_it_brings() -> None:
    controller = taught({(1, 1): 1.0, (1, 2): 1.25, (1, 3): 1.5, (1, 5): 2.0})
    assert controller.choose([line(0.9, 0.9, 0.9, 0.9)], 1, 32, False) == [4]
    assert controller.choose([line(0.9, 0.1, 0.9)], 1, 32, False) == [1]
    assert controller.choose([line(0.2, 0.9)], 1, 32, False) == [0]


def test_never_where_every_token_costs_a_step() -> None:
    controller = taught({(64, 64): 64.0, (64, 65): 65.0, (64, 68): 68.0, (64, 96): 96.0})
    assert controller.choose([line(0.9, 0.9) for _ in range(64)], 64, 32, False) == [0] * 64
    assert controller.min_chance >= 0.75


def test_the_likeliest_first() -> None:
    controller = taught({(4, 4): 1.0, (4, 5): 1.1, (4, 6): 1.6})
    assert controller.choose([line(0.3), line(0.95, 0.5), line(0.2), line(0.4)], 4, 32, False) == [0, 1, 0, 0]


def test_a_cliff_is_found_by_measurement() -> None:
    """Steps of more than 64 tokens are twice as dear, say: drafts stop at the edge."""
    cost = {(60, 60): 10.0, (60, 62): 10.1, (60, 64): 10.2, (60, 66): 20.0, (60, 76): 21.0}
    counts = taught(cost).choose([line(0.9) for _ in range(60)], 60, 32, False)
    assert sum(counts) == 4


def test_tries_before_anything_is_known() -> None:
    controller = SpeculationController()
    assert controller.choose([line(0.5, 0.5)], 1, 32, False) == [2] and controller.min_chance == MIN_CHANCE
    for seconds in (0.0, -1.0):
        controller.note(Plan(0, (Row(0, 5, 1, Output.SAMPLE),)), Result(0, step_s=seconds))
    assert controller.choose([line(0.5)], 1, 32, False) == [1]


def test_beside_prompts_only_likely_drafts() -> None:
    assert SpeculationController().choose([line(0.9, 0.4), line(0.3)], 3, 32, True) == [1, 0]


def test_a_recovered_machine_is_noticed() -> None:
    """Slow samples are forgotten once faster ones have come."""
    costs = StepCosts()
    for seconds in (9.0, 9.0, 9.0, 1.0):
        costs.note(1, 1, seconds)
    assert costs.estimate(1, 1) == 1.0
    for _ in range(8):
        costs.note(1, 1, 5.0)
    assert costs.estimate(1, 1) == 5.0


@pytest.mark.parametrize("tokens", range(1, 200, 7))
def test_estimates_never_fall_with_tokens(tokens: int) -> None:
    costs = StepCosts()
    for known, seconds in ((1, 1.0), (4, 2.0), (8, 1.9), (64, 9.0), (512, 60.0)):
        for _ in range(MIN_SAMPLES):
            costs.note(0, known, seconds)
    here, there = costs.estimate(3, tokens), costs.estimate(3, tokens + 7)
    assert here is not None and there is not None and there >= here


def test_room_is_a_limit_and_shapes_stay_few() -> None:
    controller = SpeculationController()
    lines = [line(0.99, 0.99, 0.99, 0.99, 0.99) for _ in range(64)]
    for is_mixed in (False, True):
        assert sum(controller.choose(lines, 64, 24, is_mixed)) == 24
        assert sum(controller.choose(lines, 64, 0, is_mixed)) == 0
    assert sum(controller.choose([line(*[0.99] * 5)], 1, 32, False)) == 4  # a rung


def test_a_cost_that_was_measured_long_ago_is_tried_again() -> None:
    """Breaks when one slow minute switches speculation off for good."""
    costs = StepCosts()
    for _ in range(MIN_SAMPLES):
        costs.note(1, 2, 3.0)
    for _ in range(10):
        costs.note(1, 1, 1.0)
    assert costs.estimate(1, 2) == 3.0
    for _ in range(2000):
        costs.note(1, 1, 1.0)
    assert costs.estimate(1, 2) == pytest.approx(1.4)


def test_drafts_starve_neither_rows_nor_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when drafts of older rows come before another row's one token, or before all of a prompt."""
    monkeypatch.setattr("penstock.engine.scheduling.speculation.MIXED_CHANCE", 0.001)  # all of each line
    drafting = Drafting(rate=1.0, longest=8, accuracy=1.0)
    stage = Stage(num_blocks=4000, max_num_seqs=17, max_num_batched_tokens=64, drafting=drafting)
    stage.scheduler._speculation = SpeculationController()
    for _ in range(16):
        stage.add(3, max_tokens=400)
    for _ in range(5):
        stage.step()
    late = stage.add(40, max_tokens=4)
    for _ in range(4):
        stage.step()
    counts = [sum(len(delta.tokens) for delta in stage.deltas if delta.request_id == f"r{i}") for i in range(1, 17)]
    assert any(delta.request_id == late.id for delta in stage.deltas)
    assert min(counts) >= 8 and stage.stats.num_accepted_tokens > 20


def test_nothing_is_drafted_in_steps_of_more_sequences_than_asked_for() -> None:
    controller = SpeculationController(max_ahead=4, max_rows=2)
    assert controller.choose([line(0.9), line(0.9)], 2, 32, False) == [1, 1]
    assert controller.choose([line(0.9), line(0.9)], 3, 32, False) == [0, 0]
    for _ in range(8):
        rows = tuple(Row(i, 5, 1, Output.SAMPLE) for i in range(3))
        controller.note(Plan(0, rows), Result(0, [7] * 3, step_s=1.0))
        assert controller.choose_ahead(3) == 0 and controller.min_chance == 1


class Device:
    """Steps of `num_rows` sequences, each with a line of four drafts of one chance, and with scripted costs."""

    def __init__(self, num_rows: int, chance: float, token_s: float, base_s: float = 1.0) -> None:
        self.controller, self.num_rows, self.chance = SpeculationController(), num_rows, chance
        self.token_s, self.base_s, self.rng = token_s, base_s, random.Random(num_rows)
        self.seconds = self.num_tokens = 0.0

    def see_prompts(self) -> None:
        for tokens in (256, 512, 1024):
            for _ in range(MIN_SAMPLES):
                plan = Plan(0, (Row(0, 0, tokens, Output.SAMPLE),))
                self.controller.note(plan, Result(0, [7], step_s=self.base_s + self.token_s * tokens))

    def step(self) -> int:
        """Run a step; returns its draft tokens."""
        offered = [one for one in line(*[self.chance] * 4) if one.chance >= self.controller.min_chance]
        counts = self.controller.choose([offered] * self.num_rows, self.num_rows, 4096, False)
        rows, results = [], []
        for count in counts:
            right = next((i for i in range(count) if self.rng.random() >= self.chance), count)
            rows.append(Row(0, 5, 1 + count, Output.SAMPLE, draft=tuple(line(*[0.5] * count))))
            results.append(RowResult((7,) * right + (8,)))
            self.num_tokens += 1 + right
        seconds = self.base_s + self.token_s * sum(counts)
        self.seconds += seconds
        self.controller.note(Plan(0, tuple(rows)), Result(0, results, step_s=seconds))
        return sum(counts)

    def run(self, count: int) -> list[int]:
        return [self.step() for _ in range(count)]


@pytest.mark.parametrize("num_rows", [8, 32, 64])
@pytest.mark.parametrize("chance", [0.5, 0.8])
def test_many_sequences_draft_several_tokens_each_where_tokens_are_cheap(num_rows: int, chance: float) -> None:
    """An H200's memory is the limit up to hundreds of tokens. Breaks when a fixed number of tokens is shared by all,
    or when a step that was never measured is never tried."""
    gpu = Device(num_rows, chance, token_s=0.001)
    gpu.see_prompts()
    gpu.run(600)
    assert sum(gpu.run(100)) > 100 * num_rows * (2 if chance > 0.5 else 1)
    assert gpu.num_tokens / gpu.seconds > (2.2 if chance > 0.5 else 1.5) * num_rows


@pytest.mark.parametrize("num_rows", [1, 16, 40])
@pytest.mark.parametrize("sees_prompts", [True, False])
@pytest.mark.parametrize("chance", [0.05, 0.3, 0.45])
def test_trials_cost_a_cpu_next_to_nothing(num_rows: int, sees_prompts: bool, chance: float) -> None:
    """A token costs nine tenths of a sequence's share, and drafts are seldom right: no more than 2 % may be lost."""
    cpu = Device(num_rows, chance, token_s=0.9 / num_rows)
    if sees_prompts:
        cpu.see_prompts()
    cpu.run(20)
    cpu.seconds = cpu.num_tokens = 0.0
    cpu.run(1500)
    assert cpu.num_tokens / cpu.seconds > 0.98 * num_rows


def test_numbers_of_sequences_learn_from_each_other() -> None:
    """Breaks when every other number of sequences must try for itself."""
    costs = StepCosts()
    for sequences, tokens, seconds in ((30, 30, 1.0), (30, 60, 1.1), (33, 33, 1.01)):
        for _ in range(MIN_SAMPLES):
            costs.note(sequences, tokens, seconds)
    assert costs.estimate(33, 63) == pytest.approx(1.11)
    for _ in range(MIN_SAMPLES):
        costs.note(60, 60, 1.5)
    assert costs.estimate(60, 90) > 1.8  # type: ignore[operator]


def test_beside_prompts_tokens_have_their_measured_price() -> None:
    gpu, cpu = Device(8, 0.3, token_s=0.001), Device(8, 0.3, token_s=0.1)
    for device in (gpu, cpu):
        device.see_prompts()
        device.run(MIN_SAMPLES)
    assert gpu.controller.choose([line(0.3, 0.9)], 8, 32, True) == [2]
    assert cpu.controller.choose([line(0.7, 0.9)], 8, 32, True) == [0]


def test_rungs_grow() -> None:
    assert list(RUNGS) == sorted(set(RUNGS)) and RUNGS[0] == 1
