"""Plans and results survive msgspec, so that ranks in other processes and recordings can rely on it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from penstock.cache.store import Transfer
from penstock.engine.executor import Answer, Awaited
from penstock.engine.plan import Move, Plan, Result
from tests.simulation.scenario import draw_scenario
from tests.simulation.world import World


def across(value: Any, kind: type[Any]) -> Any:
    """What another process would read."""
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)
    assert found == value and type(found) is kind
    return found


class Remote:
    """An executor behind a wire: the device sees decoded plans, the scheduler decoded results."""

    def __init__(self, world: World) -> None:
        self.world, self.verifies_trees = world, world.verifies_trees
        self.seen: Counter[str] = Counter()

    def start(self, plan: Plan) -> Any:
        self.seen.update(
            moves=sum(across(move, Move) == move for move in plan.moves),
            drafts=sum(len(row.draft) for row in plan.rows),
            admissions=len(plan.admissions),
            transfers=sum(across(one, Transfer) == one for one in (*plan.loads, *plan.saves)),
            blocks=sum(len(changes) for row in plan.rows for changes in row.blocks),
        )
        ticket, seen = self.world.start(across(plan, Plan)), self.seen

        class Decoded:
            def result(self) -> Result:
                result = ticket.result()
                result.rows = list(result.rows)
                seen["failed"] += result.error is not None
                decoded: Result = across(result, Result)
                return decoded

        return Decoded()

    def control(self, message: object) -> Awaited[Answer]:
        return self.world.control(message)

    def close(self) -> None:
        self.world.close()


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in range(12):
        world = World(draw_scenario(seed))
        remote = world.engine.executor = Remote(world)
        world.run(60)
        total += remote.seen
    return total


def test_a_device_behind_a_wire_does_the_same(seen: Counter[str]) -> None:
    """Breaks if a field of a plan or a result is dropped, renamed by the encoder or of a type that it cannot carry."""
    assert seen["admissions"] > 100 and seen["blocks"] > 500
    assert seen["transfers"] > 50 and seen["moves"] > 5 and seen["drafts"] > 20 and seen["failed"] > 0
