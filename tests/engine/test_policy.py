"""The order of admission under each policy, and that nobody waits for ever."""

from __future__ import annotations

import pytest

from penstock.engine.scheduling.policy import PASSES, POLICIES, make_policy
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.sequence import Sequence
from penstock.errors import InvalidConfig
from penstock.types import Request
from tests.engine.stage import Stage

TEXT = list(range(1, 33))


def sequence(number: int, length: int = 4, priority: int = 0, passed: int = 0) -> Sequence:
    request = Request(id=f"s{number}", tokens=tuple(range(length)), priority=priority)
    return Sequence(request, number, tokens=list(request.tokens), passed=passed)


def order(policy: str, *waiting: Sequence, hits: dict[int, int] | None = None) -> list[int]:
    return [s.number for s in make_policy(policy).order(list(waiting), lambda s: (hits or {}).get(s.number, 0))]


def test_fcfs_orders_by_arrival() -> None:
    assert order("fcfs", sequence(3), sequence(1, priority=9), sequence(2, length=1)) == [1, 2, 3]


def test_priority_orders_by_priority_then_arrival() -> None:
    assert order("priority", sequence(1, priority=2), sequence(3, priority=-1), sequence(2, priority=2)) == [3, 1, 2]


def test_lpm_orders_by_cached_prefix_then_arrival() -> None:
    assert order("lpm", *(sequence(i) for i in (1, 2, 3, 4)), hits={3: 16, 4: 16, 2: 4}) == [3, 4, 2, 1]


def test_sjf_orders_by_length_then_arrival() -> None:
    assert order("sjf", sequence(1, 9), sequence(2, 3), sequence(3, 3), sequence(4, 1)) == [4, 2, 3, 1]


@pytest.mark.parametrize("policy", ["sjf", "lpm"])
def test_who_was_overtaken_often_enough_goes_first(policy: str) -> None:
    waiting = [sequence(1, 9, passed=PASSES), sequence(2, 1), sequence(3, 8, passed=PASSES), sequence(4, 1)]
    assert order(policy, *waiting, hits={2: 8, 4: 16})[:2] == [1, 3]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_siblings_stand_in_their_order(policy: str) -> None:
    request = Request(id="s", tokens=(1, 2))
    siblings = [Sequence(request, 1, sibling, [1, 2]) for sibling in (2, 0, 1)]
    assert [s.sibling for s in make_policy(policy).order(siblings, lambda s: 0)] == [0, 1, 2]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="scheduling_policy='fair' is unknown: choose one of fcfs, priority, lpm"):
        make_policy("fair")
    with pytest.raises(InvalidConfig, match="capacity='lazy' is unknown: choose ondemand or reserve"):
        Scheduler(Stage().cache, max_num_seqs=1, max_num_batched_tokens=1, capacity="lazy")


def test_priority_admits_the_urgent_first() -> None:
    stage = Stage(policy="priority", max_num_seqs=1)
    for priority in (3, 1, 2, 1):
        stage.add(4, priority=priority)
    stage.run()
    assert stage.finished() == ["r2", "r4", "r3", "r1"]


def test_priority_takes_the_row_of_a_less_urgent_one() -> None:
    stage = Stage(policy="priority", max_num_seqs=2)
    stage.add(4, max_tokens=20, priority=1)
    stage.add(4, max_tokens=20, priority=5)
    stage.step(3)
    stage.add(4, max_tokens=2, priority=0)
    stage.run()
    assert stage.admitted() == ["r1", "r2", "r3", "r2"]
    assert stage.finished() == ["r3", "r1", "r2"]


def test_priority_takes_the_memory_of_less_urgent_ones() -> None:
    stage = Stage(policy="priority", num_blocks=10, caching=False)
    stage.add(12, max_tokens=8, priority=2)
    stage.add(12, max_tokens=8, priority=1)
    stage.step(2)
    stage.add(12, max_tokens=4, priority=0)
    stage.run()
    assert stage.admitted()[:4] == ["r2", "r1", "r3", "r1"]
    assert stage.finished()[0] == "r3"


def test_priority_never_displaces_its_equals() -> None:
    stage = Stage(policy="priority", max_num_seqs=1)
    stage.add(4, max_tokens=10, priority=1)
    stage.step()
    stage.add(4, max_tokens=2, priority=1)
    stage.run()
    assert stage.stats.num_preemptions == 0


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "sjf"])
def test_other_policies_ignore_priority(policy: str) -> None:
    stage = Stage(policy=policy, max_num_seqs=1)
    stage.add(4, max_tokens=6, priority=9)
    stage.step()
    stage.add(4, max_tokens=6, priority=0)
    stage.run()
    assert stage.finished() == ["r1", "r2"]


def test_lpm_admits_the_longest_prefix_first() -> None:
    stage = Stage(policy="lpm", max_num_seqs=1)
    stage.add([*TEXT, 99], max_tokens=1)
    stage.run()
    stage.add(4)
    stage.add([*TEXT[:16], 98], max_tokens=1)
    stage.add([*TEXT[:24], 97], max_tokens=1)
    stage.run()
    assert stage.finished() == ["r1", "r4", "r3", "r2"]


@pytest.mark.parametrize("policy", ["sjf", "lpm"])
def test_nobody_starves(policy: str) -> None:
    """Ever new requests that the policy likes better: the unlucky one is overtaken PASSES times, then no more."""
    stage = Stage(policy=policy, max_num_seqs=1)
    stage.add([*TEXT, 1], max_tokens=1)
    stage.run()
    unlucky = stage.add(40, max_tokens=1)
    for turn in range(PASSES + 5):
        stage.add([*TEXT[:8], 100 + turn], max_tokens=1)
        stage.step()
    order = stage.admitted()
    assert order.index(unlucky.id) == 1 + PASSES
    stage.run()


def test_sjf_admits_the_shortest_first() -> None:
    stage = Stage(policy="sjf", max_num_seqs=1)
    for length in (9, 3, 6):
        stage.add(length)
    stage.run()
    assert stage.finished() == ["r2", "r3", "r1"]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_head_without_room_is_not_passed_by_smaller_ones(policy: str) -> None:
    """Else a stream of small requests would keep a large one waiting for ever."""
    stage = Stage(policy=policy, num_blocks=12, caching=False)
    stage.add(16, max_tokens=24)
    stage.step()
    large = stage.add(40, max_tokens=4)
    for _ in range(20):
        stage.scheduler.roster.waiting[0].passed = PASSES
    stage.add(41, max_tokens=4)
    stage.step(5)
    assert stage.admitted() == ["r1"]
    stage.run()
    assert stage.admitted()[1] == large.id
