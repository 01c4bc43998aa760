"""The simulated device itself: a wrong block is seen at once, and would be seen in the tokens too."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.cache.kv import KVCache
from penstock.engine.plan import Admission, Move, Output, Plan, Row
from penstock.types import Request
from tests.simulation.device import Broken
from tests.simulation.executor import FakeExecutor
from tests.simulation.inspection import Limits
from tests.simulation.model import Model
from tests.simulation.scenario import Scenario, draw_groups, draw_scenario
from tests.simulation.world import World


def calm(**changes: object) -> Scenario:
    """Nothing fails and nothing is aborted."""
    groups = draw_groups(random.Random(1), ("full", "window", "recurrent"), 4)
    return Scenario(**{"seed": 5, "groups": groups, "num_blocks": 300, "special_rate": 0.4, **changes})  # type: ignore[arg-type]


def test_a_spoiled_block_is_seen_at_the_next_read() -> None:
    world = World(calm())
    for _ in range(60):
        world._arrive()
        world._step()
    for block, count in enumerate(world.cache.pool.refs):
        if count:
            world.device.memory.spoil(block)
    with pytest.raises(Broken, match="reads a wrong value"):
        world.run(200)


def test_without_the_check_it_shows_in_the_tokens() -> None:
    world = World(calm(special_rate=0.0))
    world.device.forward.strict = False
    for _ in range(60):
        world._arrive()
        world._step()
    for block, count in enumerate(world.cache.pool.refs):
        if count:
            world.device.memory.cells[block] = [value + 1 for value in world.device.memory.cells[block]]
    with pytest.raises(Broken, match="wrong tokens"):
        world.run(200)


@pytest.mark.parametrize("seed", [3, 11, 24])
def test_plans_that_run_at_once_and_plans_that_wait_agree(seed: int) -> None:
    scenario = draw_scenario(seed)
    assert World(replace(scenario, lazy=True)).run(200) == World(replace(scenario, lazy=False)).run(200)


@pytest.mark.parametrize("seed", [2, 9])
def test_a_seed_repeats_exactly(seed: int) -> None:
    assert World(draw_scenario(seed)).run(150) == World(draw_scenario(seed)).run(150)


def device() -> tuple[FakeExecutor, int, int]:
    """With two blocks taken."""
    cache = KVCache(8, 4, draw_groups(random.Random(1), ("full",), 4))
    executor = FakeExecutor(cache, Model(cache.groups), Limits(2, 8))
    return executor, cache.pool.take(), cache.pool.take()


def plan(row: Row, *, number: int = 0, moves: tuple[Move, ...] = (), tokens: tuple[int, ...] = (1, 2, 3)) -> Plan:
    return Plan(number, (row,), (Admission(row.row, Request(id="r", tokens=tokens), 0, tokens),), moves)


def test_the_budget_and_the_rows_are_watched() -> None:
    executor, block, _ = device()
    with pytest.raises(Broken, match="budget"):
        executor.start(plan(Row(0, 0, 9, Output.SAMPLE, ({0: block},))))
    with pytest.raises(Broken, match="not there"):
        executor.start(plan(Row(2, 0, 3, Output.SAMPLE, ({0: block},))))


def test_a_write_into_a_block_with_another_owner_is_caught() -> None:
    executor, block, _ = device()
    executor.cache.pool.share(block)
    with pytest.raises(Broken, match="not its own"):
        executor.start(plan(Row(0, 0, 3, Output.SAMPLE, ({0: block},))))


def test_a_write_into_a_free_block_is_caught() -> None:
    executor, block, _ = device()
    executor.cache.pool.release(block)
    with pytest.raises(Broken, match="not its own"):
        executor.start(plan(Row(0, 0, 3, Output.SAMPLE, ({0: block},))))


def test_a_block_that_a_started_plan_names_is_not_given_away() -> None:
    executor, block, _ = device()
    executor.start(plan(Row(0, 0, 3, Output.SAMPLE, ({0: block},))))
    with pytest.raises(Broken, match="a started plan names"):
        executor.start(plan(Row(1, 0, 3, Output.SAMPLE, ({0: block},)), number=1))


def test_a_move_into_a_shared_block_is_caught() -> None:
    executor, block, other = device()
    executor.cache.pool.share(other)
    with pytest.raises(Broken, match="a move into a block in use"):
        executor.start(plan(Row(0, 0, 3, Output.SAMPLE, ({0: block},)), moves=(Move(block, other),)))


def test_more_positions_than_tokens_are_caught() -> None:
    executor, block, _ = device()
    with pytest.raises(Broken, match="more positions than tokens"):
        executor.start(plan(Row(0, 0, 4, Output.SAMPLE, ({0: block},)))).result()


def test_plans_are_awaited_in_order() -> None:
    executor, block, other = device()
    executor.start(plan(Row(0, 0, 3, Output.SAMPLE, ({0: block},))))
    second = executor.start(plan(Row(1, 0, 3, Output.SAMPLE, ({0: other},)), number=1))
    with pytest.raises(Broken, match="out of order"):
        second.result()
