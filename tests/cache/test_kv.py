"""Sharing, copy-on-write, windows and snapshots, one at a time."""

from __future__ import annotations

import pytest

from penstock.cache.holding import ABSENT
from penstock.cache.radix import Root
from tests.cache.content import FULL, STATE, WINDOW, Content, Writer


def grown(content: Content, tokens: list[int], snapshot: bool = False, chunk: int | None = None) -> Writer:
    writer = content.begin("", tokens)
    while writer.computed < len(tokens):
        count = min(chunk or len(tokens), len(tokens) - writer.computed)
        assert content.advance(writer, count, snapshot)
    return writer


def test_a_second_sequence_takes_the_same_blocks() -> None:
    content = Content(16, 4, [FULL])
    first = grown(content, [1] * 12)
    second = content.begin("", [1] * 12)
    assert second.computed == 8
    assert second.holding.tables[0] == first.holding.tables[0][:2]
    assert content.cache.pool.num_used == 3


def test_equal_blocks_computed_twice_are_kept_once() -> None:
    content = Content(16, 4, [FULL])
    first, second = content.begin("", [1] * 8), content.begin("", [1] * 8)
    content.advance(first, 8)
    content.advance(second, 8)
    assert first.holding.tables == second.holding.tables
    assert second.holding.changed[0] == {0: first.holding.tables[0][0], 1: first.holding.tables[0][1]}
    assert content.cache.pool.num_used == 2
    content.cache.check([first.holding, second.holding])


def test_without_prefix_caching_nothing_is_kept() -> None:
    content = Content(16, 4, [FULL], caching=False)
    writer = grown(content, [1] * 8)
    assert content.begin("", [1] * 8).computed == 0
    content.cache.release(writer.holding)
    assert content.cache.pool.num_free == 16


def test_a_fork_shares_until_one_of_the_two_writes() -> None:
    content = Content(16, 4, [FULL])
    parent = grown(content, [1] * 6)
    parent.holding.steady_until = 8
    child = content.fork(parent, 6, [2, 2])
    assert child is not None
    assert child.holding.tables == parent.holding.tables and not parent.holding.steady_until
    copies = content.cache.copies.num_copied
    content.advance(child, 1)
    assert content.cache.copies.num_copied == copies + 1
    assert child.holding.tables[0][0] == parent.holding.tables[0][0]
    assert child.holding.tables[0][1] != parent.holding.tables[0][1]
    parent.tokens.append(3)
    content.advance(parent, 1)
    assert content.cache.copies.num_copied == copies + 1, "the other has its block alone by then"


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    content = Content(16, 4, [FULL])
    parent = grown(content, [1] * 8)
    child = content.fork(parent, 8, [2])
    assert child is not None and content.advance(child, 1)
    assert content.cache.copies.num_copied == 0


def test_a_fork_of_earlier_positions_ends_there_in_the_tree_too() -> None:
    content = Content(16, 2, [FULL])
    parent = grown(content, [1] * 8)
    child = content.fork(parent, 3, [2] * 5)
    assert child is not None
    assert (child.holding.num_inserted, len(child.holding.tables[0])) == (1, 2)
    assert content.advance(child, 5)
    assert content.cache.match(Root(), [1, 1, 1, 2, 2, 2, 2, 2, 0]) == 8


def test_needed_counts_new_blocks_and_copies() -> None:
    content = Content(16, 4, [FULL])
    parent = grown(content, [1] * 6)
    child = content.fork(parent, 6, [2] * 9)
    assert child is not None
    cache = content.cache
    assert cache.count_needed(child.holding, 6, 7) == 1, "the copy"
    assert cache.count_needed(child.holding, 6, 9) == 2, "the copy and one more"
    free = cache.pool.num_free
    cache.grow(child.holding, 6, 9, 0)
    assert free - cache.pool.num_free == 2


def test_a_window_gives_its_old_blocks_back() -> None:
    content = Content(32, 2, [WINDOW])
    writer = grown(content, list(range(20)), chunk=4)
    table = writer.holding.tables[0]
    # A query at 20 reads 16 to 20: two blocks of two.
    assert table[:8] == [ABSENT] * 8 and ABSENT not in table[8:]
    assert content.cache.pool.num_used == 2
    assert writer.holding.num_blocks == 2


def test_a_window_resumes_without_its_old_blocks() -> None:
    content = Content(32, 2, [FULL, WINDOW])
    tokens = list(range(16))
    content.cache.release(grown(content, tokens).holding)
    second = content.begin("", [*tokens, 99])
    assert second.computed == 16
    assert second.holding.tables[1][:6] == [ABSENT] * 6 and ABSENT not in second.holding.tables[1][6:]
    assert content.advance(second, 1)


def test_a_fork_needs_what_the_window_has_given_up() -> None:
    content = Content(32, 2, [WINDOW])
    writer = grown(content, list(range(20)), chunk=4)
    assert content.fork(writer, 10, [1]) is None
    assert content.fork(writer, 20, [1]) is not None


def test_a_recurrent_state_resumes_from_a_copy_of_a_snapshot() -> None:
    content = Content(32, 4, [FULL, STATE])
    tokens = list(range(10))
    content.cache.release(grown(content, tokens, snapshot=True, chunk=4).holding)
    assert content.cache.match(Root(), tokens) == 8
    second = content.begin("", tokens)
    assert second.computed == 8
    state = content.cache.tree.match(Root(), tokens)[1].slots[1]
    assert second.holding.resume == {1: state}
    assert content.advance(second, 2)
    assert second.holding.resume == {}
    assert set(second.holding.tables[1]).isdisjoint(state or ())


def test_a_snapshot_whose_plan_did_not_end_is_given_up() -> None:
    content = Content(32, 4, [FULL, STATE])
    cache = content.cache
    writer = content.begin("", list(range(10)))
    content.advance(writer, 4)
    cache.grow(writer.holding, 4, 8, 7)
    cache.snapshots.take(writer.holding, 4, 7)
    cache.snapshots.keep(writer.holding, 6)
    assert len(writer.holding.snapshots) == 1
    cache.release(writer.holding)
    cache.check([])
    assert not any(present[1] for present in content.held().values())
    assert cache.copies.pending == []
    cache.pool.end(7)
    assert cache.pool.num_used == cache.pool.num_limbo == 0


def test_a_recurrent_state_forks_only_where_it_stands() -> None:
    content = Content(32, 4, [STATE])
    writer = grown(content, list(range(6)))
    assert content.fork(writer, 5, [1]) is None
    child = content.fork(writer, 6, [1])
    assert child is not None and content.advance(child, 1)


def test_release_forgets_copies_that_are_no_longer_due() -> None:
    content = Content(32, 4, [STATE])
    writer = grown(content, list(range(6)))
    other = content.cache.fork(writer.holding, 6, at_end=True)
    assert other is not None and len(content.cache.copies.pending) == 2
    content.cache.release(other)
    assert content.cache.copies.pending == []


def test_blocks_of_a_released_sequence_wait_for_its_last_plan() -> None:
    content = Content(8, 4, [FULL])
    cache = content.cache
    writer = content.begin("", [1] * 4)
    cache.grow(writer.holding, 0, 4, 5)
    cache.release(writer.holding)
    assert cache.pool.num_limbo == 1
    cache.pool.end(5)
    assert cache.pool.num_limbo == 0


def test_a_shared_block_waits_for_the_plan_that_copies_from_it() -> None:
    content = Content(8, 4, [FULL])
    cache = content.cache
    parent = grown(content, [1] * 2)
    child = content.fork(parent, 2, [2])
    assert child is not None
    cache.grow(child.holding, 2, 3, 9)
    cache.release(parent.holding)
    assert cache.pool.num_limbo == 1
    cache.pool.end(9)
    assert cache.pool.num_limbo == 0


def test_blocks_to_counts_every_group() -> None:
    cache = Content(8, 4, [FULL, WINDOW, STATE]).cache
    # 40 positions: 10 blocks; a window of 5 with steps of 1: at most 3; a state: 2.
    assert cache.blocks_to(40) == 10 + 3 + 2
    assert cache.blocks_to(40, chunk=16) == 10 + 7 + 2
    assert cache.snapshots.state_blocks == 2


def test_check_finds_an_owner_too_few() -> None:
    content = Content(8, 4, [FULL])
    writer = grown(content, [1] * 3)
    content.cache.pool.share(writer.holding.tables[0][0])
    with pytest.raises(AssertionError, match="other owners"):
        content.cache.check([writer.holding])
