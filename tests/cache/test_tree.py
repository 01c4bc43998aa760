"""Pool and tree together as a state machine: every read finds what was written, every match is the longest there is."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.cache.group import Group
from penstock.cache.pool import BlockPool
from penstock.cache.radix import RadixCache, Root
from tests.cache.content import FULL, STATE, WINDOW, Content, Writer
from tests.simulation.effort import effort

GROUPS = [[FULL], [WINDOW], [STATE], [FULL, WINDOW], [FULL, STATE], [WINDOW, STATE], [FULL, WINDOW, STATE]]
TEXTS = [[1] * 24, [1] * 10 + [2] * 14, [1, 2] * 12, [3] * 24]


class TreeMachine(RuleBasedStateMachine):
    @initialize(groups=st.sampled_from(GROUPS), size=st.integers(1, 4), num_blocks=st.integers(8, 40))
    def setup(self, groups: list[Group], size: int, num_blocks: int) -> None:
        self.content = Content(num_blocks, size, groups)
        self.writers: list[Writer] = []

    @rule(salt=st.sampled_from(["", "a"]), text=st.sampled_from(TEXTS), length=st.integers(1, 24))
    def begin(self, salt: str, text: list[int], length: int) -> None:
        tokens = text[:length]
        expected = self.content.longest(salt, tokens)
        assert self.content.cache.match(Root(salt), tokens) == expected
        writer = self.content.begin(salt, tokens)
        assert writer.computed == expected < length
        self.writers.append(writer)

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), count=st.integers(1, 9), snapshot=st.booleans())
    def advance(self, data: st.DataObject, count: int, snapshot: bool) -> None:
        writer = data.draw(st.sampled_from(self.writers))
        count = min(count, len(writer.tokens) - writer.computed)
        if count:
            self.content.advance(writer, count, snapshot)
        else:
            writer.tokens.append(data.draw(st.sampled_from([1, 2])))

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), tokens=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=6), at_end=st.booleans())
    def fork(self, data: st.DataObject, tokens: list[int], at_end: bool) -> None:
        writer = data.draw(st.sampled_from(self.writers))
        position = writer.computed if at_end else data.draw(st.integers(0, writer.computed))
        child = self.content.fork(writer, position, tokens)
        if child is not None:
            self.writers.append(child)

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        writer = data.draw(st.sampled_from(self.writers))
        self.writers.remove(writer)
        self.content.cache.release(writer.holding)

    @rule(num_free=st.integers(0, 12))
    def evict(self, num_free: int) -> None:
        pool, tree = self.content.cache.pool, self.content.cache.tree
        before = self.content.held()
        if tree.evict(num_free):
            assert pool.num_free >= num_free
        else:
            assert pool.num_idle == 0 and pool.num_free < num_free
        assert set(self.content.held()) <= set(before)

    @rule()
    def clear(self) -> None:
        cache, before = self.content.cache, self.content.held()
        cache.tree.clear()
        assert set(self.content.held()) <= set(before)
        assert self.writers or cache.pool.num_idle == 0

    @invariant()
    def owners_are_counted(self) -> None:
        if hasattr(self, "content"):
            self.content.cache.check([writer.holding for writer in self.writers])

    def teardown(self) -> None:
        if hasattr(self, "content"):
            cache = self.content.cache
            for writer in self.writers:
                cache.release(writer.holding)
            assert cache.pool.num_used == 0
            cache.tree.clear()
            assert cache.pool.num_free == cache.pool.num_blocks
            assert not list(cache.tree.nodes())


TestTree = TreeMachine.TestCase
TestTree.settings = effort(70, steps=40)


def grown(content: Content, salt: str, tokens: list[int]) -> Writer:
    """A writer that has computed all its tokens."""
    writer = content.begin(salt, tokens)
    assert content.advance(writer, len(tokens) - writer.computed)
    return writer


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    content = Content(6, 2, [FULL])
    for first in (1, 2, 3):
        content.cache.release(grown(content, "", [first] * 4).holding)
    content.cache.release(content.begin("", [1] * 5).holding)  # touches the first
    content.cache.tree.evict(2)
    assert [content.cache.match(Root(), [first] * 5) for first in (1, 2, 3)] == [4, 0, 4]
    content.cache.tree.evict(4)
    assert [content.cache.match(Root(), [first] * 5) for first in (1, 2, 3)] == [4, 0, 0]


def test_a_path_is_evicted_from_its_end() -> None:
    content = Content(4, 2, [FULL])
    content.cache.release(grown(content, "", [1] * 8).holding)
    matches = []
    for num_free in range(1, 5):
        content.cache.tree.evict(num_free)
        matches.append(content.cache.match(Root(), [1] * 9))
    assert matches == [6, 4, 2, 0]


def test_what_is_in_use_is_never_evicted() -> None:
    content = Content(4, 2, [FULL])
    writer = grown(content, "", [1] * 4)
    content.cache.release(grown(content, "", [2] * 4).holding)
    assert not content.cache.tree.evict(3)
    assert content.cache.pool.num_free == 2
    assert content.cache.match(Root(), [1] * 5) == 4
    assert content.advance(writer, 0)


def test_a_window_is_evicted_before_the_whole_node() -> None:
    """A prefix without its window is useless, but a longer one beside it may not be."""
    content = Content(8, 2, [FULL, WINDOW])
    content.cache.release(grown(content, "", [1] * 8).holding)
    content.cache.tree.evict(1)
    held = content.held()
    assert all(present[0] for present in held.values()), "a full block went first"
    assert sum(present[1] for present in held.values()) == 3


def test_prefixes_are_shared_only_within_a_salt() -> None:
    content = Content(8, 2, [FULL])
    content.cache.release(grown(content, "a", [1] * 4).holding)
    assert (content.cache.match(Root("a"), [1] * 5), content.cache.match(Root("b"), [1] * 5)) == (4, 0)


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    content = Content(8, 2, [FULL])
    content.cache.release(grown(content, "", [1] * 4).holding)
    assert [content.cache.match(Root(), [1] * length) for length in (2, 3, 4, 5, 6)] == [0, 2, 2, 4, 4]


def test_only_whole_blocks_enter_the_tree() -> None:
    content = Content(8, 4, [FULL])
    content.cache.release(grown(content, "", [1] * 7).holding)
    assert set(content.held()) == {("", (1,) * 4)}
    assert content.cache.pool.num_idle == 1


def test_check_finds_a_mislinked_node_and_a_lost_pin() -> None:
    content = Content(8, 2, [FULL])
    writer = grown(content, "", [1] * 4)
    cache = content.cache
    cache.check([writer.holding])
    cache.tree.pin(next(iter(cache.tree.nodes())))
    with pytest.raises(AssertionError, match="pinned by no holding"):
        cache.check([writer.holding])
    tree = RadixCache(BlockPool(2), [FULL], 2)
    node = tree.extend(tree.root(Root()), (1, 2))
    node.parent = node
    with pytest.raises(AssertionError, match="mislinked"):
        tree.check()
