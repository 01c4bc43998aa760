"""The pool against a model that keeps a list of owners per block."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.cache.pool import BlockPool
from tests.simulation.effort import effort

NUM_BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """Owners come and go; the last plan that each named a block in is remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.idle_calls: list[int] = []
        self.pool = BlockPool(NUM_BLOCKS, self.idle_calls.append)
        self.users: Counter[int] = Counter()
        self.cached: set[int] = set()
        self.busy = dict.fromkeys(range(NUM_BLOCKS), -1)
        self.started = -1
        self.ended = -1

    def owned(self) -> list[int]:
        return [block for block in range(NUM_BLOCKS) if self.users[block] or block in self.cached]

    def free(self) -> list[int]:
        owned = self.owned()
        return [block for block in range(NUM_BLOCKS) if block not in owned and self.busy[block] <= self.ended]

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def take(self) -> None:
        free = self.free()
        block = self.pool.take()
        assert block in free
        self.users[block] = 1

    @precondition(lambda self: self.owned())
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.owned()))
        self.pool.share(block)
        self.users[block] += 1

    @precondition(lambda self: +self.users)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(+self.users)))
        after = data.draw(st.integers(-1, self.started))
        self.idle_calls.clear()
        self.pool.release(block, after)
        self.users[block] -= 1
        self.busy[block] = max(self.busy[block], after)
        assert self.idle_calls == ([block] if not self.users[block] and block in self.cached else [])

    @precondition(lambda self: any(block not in self.cached for block in +self.users))
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([block for block in sorted(+self.users) if block not in self.cached]))
        self.pool.cache(block)
        self.cached.add(block)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def uncache(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.cached)))
        if self.users[block]:
            with pytest.raises(RuntimeError, match="in use"):
                self.pool.uncache(block)
        else:
            self.pool.uncache(block)
            self.cached.remove(block)

    @rule()
    def start_plan(self) -> None:
        self.started += 1

    @precondition(lambda self: self.ended < self.started)
    @rule(data=st.data())
    def end_plan(self, data: st.DataObject) -> None:
        self.ended = data.draw(st.integers(self.ended + 1, self.started))
        self.pool.end(self.ended)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        idle = [block for block in self.cached if not self.users[block]]
        assert self.pool.num_free == len(self.free())
        assert self.pool.num_idle == len(idle)
        assert self.pool.num_limbo == NUM_BLOCKS - len(self.owned()) - len(self.free())
        assert self.pool.num_used == len(+self.users)
        for block in range(NUM_BLOCKS):
            assert self.pool.refs[block] == self.users[block] + (block in self.cached)
            assert self.pool.num_users(block) == self.users[block]


TestPool = PoolMachine.TestCase
TestPool.settings = effort(60, steps=60)


def test_a_block_named_by_a_started_plan_waits_for_it() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.release(block, after=3)
    assert (pool.num_free, pool.num_limbo) == (1, 1)
    pool.end(2)
    assert pool.num_limbo == 1
    pool.end(3)
    assert (pool.num_free, pool.num_limbo) == (2, 0)


def test_the_last_of_several_owners_decides_how_long_to_wait() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.share(block)
    pool.release(block, after=7)
    pool.release(block, after=2)
    pool.end(6)
    assert pool.num_free == 0
    pool.end(7)
    assert pool.num_free == 1


def test_an_evicted_block_waits_for_the_plan_of_its_last_user() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.cache(block)
    pool.release(block, after=4)
    pool.uncache(block)
    assert (pool.num_free, pool.num_limbo) == (0, 1)
    pool.end(4)
    assert pool.num_free == 1


def test_misuse_raises() -> None:
    pool = BlockPool(2)
    with pytest.raises(RuntimeError, match="no owner"):
        pool.share(0)
    block = pool.take()
    pool.release(block)
    with pytest.raises(RuntimeError, match="more often"):
        pool.release(block)
    with pytest.raises(RuntimeError, match="in use"):
        pool.uncache(pool.take())


def test_check_finds_a_lost_and_a_doubled_block() -> None:
    lost = BlockPool(2)
    lost._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        lost.check()
    doubled = BlockPool(2)
    doubled._free.append(0)
    with pytest.raises(AssertionError, match="free twice"):
        doubled.check()
