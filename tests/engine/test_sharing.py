"""Prefixes computed once: across requests, among requests that come together, among siblings."""

from __future__ import annotations

import pytest

from penstock.cache.group import Group
from tests.engine.stage import FULL, STATE, Stage, window

TEXT = list(range(1, 33))


def test_a_later_request_reads_the_prefix_from_the_cache() -> None:
    stage = Stage()
    stage.add([*TEXT, 100])
    stage.run()
    stage.add([*TEXT, 200])
    stage.run()
    assert stage.counts()[0] == [33] and stage.counts()[4] == [1]
    assert stage.stats.num_cached_tokens == 32
    assert stage.deltas[-1].num_cached_tokens == 32


def test_the_answer_is_a_prefix_too() -> None:
    stage = Stage()
    first = stage.add(8, max_tokens=9)
    stage.run()
    answer = [token for delta in stage.deltas for token in delta.tokens]
    stage.add([*first.tokens, *answer, 5])
    stage.run()
    assert stage.deltas[-1].num_cached_tokens == 16


def test_a_hit_ends_before_the_last_token() -> None:
    stage = Stage()
    for _ in range(2):
        stage.add(list(TEXT))
        stage.run()
    assert stage.deltas[-1].num_cached_tokens == 28


@pytest.mark.parametrize(
    "groups", [(FULL,), (window(9),), (FULL, window(9)), (FULL, STATE), (STATE,), (FULL, window(9), STATE)]
)
@pytest.mark.parametrize("overlap", [0, 2])
def test_equal_prefixes_that_come_together_are_computed_once(groups: tuple[Group, ...], overlap: int) -> None:
    stage = Stage(*groups, max_num_batched_tokens=16, overlap=overlap, num_blocks=200)
    for last in range(5):
        stage.add([*TEXT, 100 + last], max_tokens=1)
    stage.run()
    assert stage.stats.num_computed_tokens == 33 + 4


def test_a_prefix_of_another_salt_is_computed_anew() -> None:
    stage = Stage()
    for salt in ("a", "b"):
        stage.add([*TEXT, 100], max_tokens=1, salt=salt)
    stage.run()
    assert stage.stats.num_computed_tokens == 66


def test_a_request_that_shares_nothing_does_not_wait() -> None:
    stage = Stage(max_num_batched_tokens=40)
    stage.add([*TEXT, 100])
    stage.add([*TEXT, 200])
    stage.add(3)
    stage.run()
    assert stage.admitted() == ["r1", "r3", "r2"]


def test_without_prefix_caching_everyone_computes() -> None:
    stage = Stage(caching=False)
    for last in range(3):
        stage.add([*TEXT, 100 + last], max_tokens=1)
    stage.run()
    assert stage.stats.num_computed_tokens == 99
    assert stage.stats.num_cached_tokens == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_siblings_share_the_prompt_and_copy_its_last_block(caching: bool, overlap: int) -> None:
    stage = Stage(caching=caching, overlap=overlap)
    stage.add(30, max_tokens=6, n=4)
    stage.run()
    assert stage.stats.num_forks == 3
    assert stage.cache.copies.num_copied == 3, "one block each: the prompt does not end at a boundary"
    assert stage.stats.num_computed_tokens == 30 + 3 + 4 * 5


def test_siblings_of_a_prompt_that_ends_at_a_boundary_copy_nothing() -> None:
    stage = Stage()
    stage.add(29, max_tokens=6, n=4)
    stage.run()
    assert (stage.stats.num_forks, stage.cache.copies.num_copied) == (3, 0)


def test_siblings_differ_and_the_first_is_the_answer_without_siblings() -> None:
    one, many = Stage(), Stage()
    one.add(9, max_tokens=8, id="r", seed=5)
    many.add(9, max_tokens=8, id="r", seed=5, n=1, best_of=3)
    answers: list[dict[int, list[int]]] = []
    for stage in (one, many):
        stage.run()
        answer: dict[int, list[int]] = {}
        for delta in stage.deltas:
            answer.setdefault(delta.sibling, []).extend(delta.tokens)
        answers.append(answer)
    assert answers[0][0] == answers[1][0]
    assert len(answers[1]) == 3 and answers[1][1] != answers[1][0]


def test_siblings_do_not_wait_for_a_leader_that_is_gone() -> None:
    stage = Stage(max_num_batched_tokens=4)
    request = stage.add(20, n=3)
    stage.step(2)
    stage.abort(request, 0)
    stage.run()
    assert sorted(delta.finish_reason or "" for delta in stage.deltas if delta.finish_reason) == [
        "abort",
        "length",
        "length",
    ]


def test_a_window_frees_blocks_while_the_answer_grows() -> None:
    stage = Stage(window(8), num_blocks=5, block_size=4, max_num_batched_tokens=4)
    stage.add(40, max_tokens=40)
    stage.run()
    assert stage.stats.num_preemptions == 0


def test_a_recurrent_state_resumes_from_the_last_boundary_of_the_prompt() -> None:
    stage = Stage(FULL, STATE)
    stage.add([*TEXT, 100, 101], max_tokens=1)
    stage.run()
    stage.add([*TEXT, 200, 201], max_tokens=1)
    stage.run()
    assert stage.deltas[-1].num_cached_tokens == 32


def test_a_step_stops_where_a_snapshot_is_due() -> None:
    stage = Stage(FULL, STATE, block_size=4)
    stage.add(42, max_tokens=1)
    stage.run()
    assert stage.counts() == [[16], [16], [8], [2]], "every fourth block, and the last boundary of the prompt"


def test_prompt_logprobs_are_computed_not_read() -> None:
    stage = Stage(max_num_batched_tokens=8)
    stage.add(list(TEXT), max_tokens=1)
    stage.run()
    before = stage.stats.num_computed_tokens
    stage.add(list(TEXT), max_tokens=2, prompt_logprobs=0)
    stage.run()
    assert stage.stats.num_computed_tokens - before == 33
    first = next(delta for delta in stage.deltas if delta.prompt_logprobs)
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 32
    assert first.prompt_logprobs[0] is None


def test_pooling_reads_nothing_from_the_cache() -> None:
    stage = Stage()
    stage.add(list(TEXT), max_tokens=1)
    stage.run()
    stage.add(list(TEXT), pool=True)
    stage.run()
    assert stage.counts()[-1] == [32]
