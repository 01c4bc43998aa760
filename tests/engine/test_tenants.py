"""When memory runs out and several tenants have sequences: who gives way, who is spared, who returns."""

from __future__ import annotations

import pytest

from penstock.engine.sequence import Status
from penstock.types import Request
from tests.engine.stage import FULL, STATE, Stage, window


def preempted(stage: Stage, *requests: Request) -> int:
    """How often sequences of these were admitted again."""
    ids = [request.id for request in requests]
    admitted = [one for one in stage.admitted() if one in ids]
    return len(admitted) - sum(request.num_siblings for request in requests)


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm", "sjf"])
def test_a_small_tenant_loses_nothing_to_one_that_grows(policy: str, overlap: int) -> None:
    stage = Stage(num_blocks=64, max_num_seqs=16, policy=policy, overlap=overlap)
    flood = stage.add(4, max_tokens=80, n=12, tenant="a")
    stage.step(3)
    small = stage.add(4, max_tokens=60, tenant="b")
    begun = len(stage.plans)
    while small.id not in stage.finished():
        stage.step()
    assert preempted(stage, small) == 0 and stage.stats.num_preemptions > 0
    assert flood.id not in stage.finished()
    assert len(stage.plans) - begun <= 60 + 2 * (1 + overlap), "a token at each step"
    stage.run()


def test_without_tenants_the_last_arrival_gives_way() -> None:
    stage = Stage(num_blocks=64, max_num_seqs=16)
    stage.add(4, max_tokens=80, n=12)
    stage.step(3)
    small = stage.add(4, max_tokens=60)
    stage.run()
    assert preempted(stage, small) > 0


def test_a_tenant_within_its_share_takes_from_a_better_rank() -> None:
    stage = Stage(num_blocks=16, caching=False)
    large = stage.add(40, max_tokens=20, tenant="a")  # ten blocks and more: above its eight
    small = stage.add(8, max_tokens=20, tenant="b")  # at most seven
    stage.run()
    assert (preempted(stage, large), preempted(stage, small)) == (1, 0)
    assert stage.finished() == [small.id, large.id]


def test_the_tenant_that_holds_the_most_gives_way() -> None:
    stage = Stage(num_blocks=30, caching=False)
    most = stage.add(48, max_tokens=30, tenant="a")
    more = stage.add(40, max_tokens=30, tenant="b")
    small = stage.add(8, max_tokens=30, tenant="c")
    while not stage.stats.num_preemptions:
        stage.step()
    assert stage.sequences(most)[0].num_preempted == 1
    assert stage.sequences(more)[0].num_preempted == stage.sequences(small)[0].num_preempted == 0
    stage.run()


def test_blocks_that_siblings_share_count_once() -> None:
    stage = Stage(num_blocks=40, max_num_seqs=8)
    siblings = stage.add(33, max_tokens=4, n=6, tenant="a")  # nine blocks in common and one or two of each
    stage.step(2)
    assert stage.scheduler._shares.usage()["a"] <= 9 + 2 * 6
    stage.abort(siblings)


def test_a_waiting_tenant_gets_its_share_of_a_full_cache() -> None:
    stage = Stage(num_blocks=32, max_num_seqs=16, max_num_batched_tokens=128, caching=False)
    flood = [stage.add(8, max_tokens=60, tenant="a") for _ in range(10)]
    while not stage.stats.num_preemptions:
        stage.step()
    late = stage.add(24, max_tokens=8, tenant="b")
    stage.step(2)
    assert stage.sequences(late)[0].status is Status.RUNNING
    while late.id not in stage.finished():
        stage.step()
    assert preempted(stage, late) == 0
    assert all(request.id not in stage.finished() for request in flood)
    stage.run()


def test_equals_at_exactly_their_shares_go_on_by_rank() -> None:
    """Nobody is above its share and the cache is full: somebody must give way."""
    stage = Stage(num_blocks=8, caching=False)
    first = stage.add(12, max_tokens=20, tenant="a")
    stage.add(12, max_tokens=20, tenant="b")
    stage.run()
    assert stage.finished()[0] == first.id


@pytest.mark.parametrize("groups", [(FULL,), (FULL, STATE), (FULL, window(6))])
@pytest.mark.parametrize("count", [2, 3])
def test_tenants_do_not_preempt_each_other_for_ever(groups: tuple, count: int) -> None:
    stage = Stage(*groups, num_blocks=24, max_num_seqs=8, max_num_batched_tokens=16)
    for index in range(12):
        stage.add(6 + index, max_tokens=40, tenant=f"t{index % count}", n=1 + index % 2)
    stage.run(4000)
    assert stage.device.tally.num_recomputed <= stage.device.tally.num_computed / 2


def test_priorities_displace_nobody_of_a_tenant_within_its_share() -> None:
    stage = Stage(num_blocks=16, policy="priority", caching=False)
    large = stage.add(36, max_tokens=8, priority=0, tenant="a")
    small = stage.add(8, max_tokens=8, priority=5, tenant="b")
    stage.step(2)
    stage.add(12, max_tokens=4, priority=-1, tenant="a")
    stage.run()
    assert preempted(stage, small) == 0
    assert large.id in stage.finished()


def test_the_tenants_with_requests_are_known() -> None:
    stage = Stage()
    requests = [stage.add(4, tenant=name, n=2) for name in "aab"]
    roster = stage.scheduler.roster
    assert roster.tenants == {"a": 2, "b": 1}
    stage.abort(requests[2])
    assert roster.tenants == {"a": 2} and not stage.scheduler._shares.is_contested
    stage.run()
    assert not roster.tenants
