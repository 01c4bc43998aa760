"""When memory runs out: who gives way, who waits, who is refused."""

from __future__ import annotations

import pytest

from penstock.errors import InvalidRequest
from tests.engine.stage import FULL, STATE, Stage, window


def test_the_victim_is_the_one_that_loses_the_least_work() -> None:
    stage = Stage(num_blocks=13, caching=False)
    stage.add(8, max_tokens=24)  # ranks first: takes the last blocks
    small = stage.add(5, max_tokens=20)  # three blocks of work by then
    large = stage.add(25, max_tokens=20)  # seven, and it ranks last
    while not stage.stats.num_preemptions:
        stage.step()
    assert stage.sequences(small)[0].num_preempted == 1
    assert stage.sequences(large)[0].num_preempted == 0
    stage.run()


def test_among_equals_the_last_arrival_gives_way() -> None:
    stage = Stage(num_blocks=9, caching=False)
    for _ in range(3):
        stage.add(8, max_tokens=12)
    stage.run()
    assert stage.admitted()[:4] == ["r1", "r2", "r3", "r3"]


def test_preemption_changes_no_answer_and_computed_starts_over() -> None:
    stage = Stage(num_blocks=8, caching=False)
    first, second = stage.add(10, max_tokens=16), stage.add(10, max_tokens=16)
    while not stage.stats.num_preemptions:
        stage.step()
    sequence = stage.sequences(second)[0]
    assert (sequence.computed, sequence.row, sequence.num_preempted) == (0, -1, 1)
    assert sequence.num_output > 0, "its tokens stay"
    assert stage.sequences(first)[0].num_preempted == 0
    stage.run()


def test_a_preempted_sequence_finds_its_prefix_again() -> None:
    stage = Stage(num_blocks=10)
    stage.add(16, max_tokens=16)
    stage.add(16, max_tokens=16)
    stage.run()
    assert stage.stats.num_preemptions > 0
    assert stage.stats.num_cached_tokens > 0
    assert stage.device.tally.num_recomputed < 32


def test_a_preempted_sequence_returns_only_to_more_room() -> None:
    """Otherwise two sequences that do not both fit would throw each other out at every block."""
    stage = Stage(num_blocks=16, caching=False)
    for _ in range(4):
        stage.add(8, max_tokens=40)
    stage.run()
    returns = {f"r{i}": stage.admitted().count(f"r{i}") - 1 for i in range(1, 5)}
    assert max(returns.values()) <= 4, returns
    assert stage.device.tally.num_recomputed <= stage.device.tally.num_computed / 2


@pytest.mark.parametrize("times, admitted", [(0, True), (2, True), (3, False), (30, False)])
def test_the_room_a_sequence_asks_for_doubles_with_each_preemption(times: int, admitted: bool) -> None:
    stage = Stage(num_blocks=12, caching=False)
    stage.add(20, max_tokens=20)
    stage.step(2)  # six blocks, and one kept for its growth: five are left
    late = stage.add(4, max_tokens=40)
    stage.sequences(late)[0].num_preempted = times
    stage.step()
    assert (late.id in stage.admitted()) == admitted
    stage.run()


def test_prompt_logprobs_of_a_prompt_preempted_in_its_middle_come_once() -> None:
    """The ledger compares them one by one."""
    stage = Stage(num_blocks=20, max_num_batched_tokens=4)
    for _ in range(3):
        stage.add(6, max_tokens=24)
    stage.step(5)
    prompt = stage.add(32, max_tokens=2, prompt_logprobs=0)
    sequence = stage.sequences(prompt)[0]
    for _ in range(40):
        stage.step()
        if sequence.num_preempted:
            break
    assert 0 < len(sequence.prompt_logprobs) < 31
    stage.run()


def test_reserve_admits_only_what_fits_to_the_end() -> None:
    stage = Stage(num_blocks=20, capacity="reserve", caching=False)
    for _ in range(4):
        stage.add(8, max_tokens=20)  # seven blocks at the end
    stage.run()
    assert stage.stats.num_preemptions == 0
    assert stage.stats.max_batch_size == 2
    ondemand = Stage(num_blocks=20, caching=False)
    for _ in range(4):
        ondemand.add(8, max_tokens=20)
    ondemand.run()
    assert ondemand.stats.max_batch_size == 4


@pytest.mark.parametrize("overlap", [0, 2])
def test_reserve_never_preempts(overlap: int) -> None:
    stage = Stage(FULL, STATE, num_blocks=24, capacity="reserve", overlap=overlap, max_num_batched_tokens=16)
    for i in range(12):
        stage.add([*range(10), 50 + i], max_tokens=5 + i, n=1 + i % 3)
    stage.run()
    assert stage.stats.num_preemptions == 0


def test_the_longest_request_that_fits_runs_alone() -> None:
    stage = Stage(FULL, window(6), STATE, num_blocks=8 + 3 + 1)
    stage.add(20, max_tokens=12)
    stage.run()
    stage.add([*range(1000, 1020)], max_tokens=12, n=3)
    stage.run()


def test_a_hit_that_fills_the_cache_is_given_up() -> None:
    """The snapshot and the state resumed from it need a block each; with the rest of the prompt that is too much."""
    stage = Stage(FULL, STATE, num_blocks=6 + 1)
    for _ in range(2):
        stage.add(list(range(20)), max_tokens=4)
        stage.run()


def test_sequences_that_share_everything_can_be_preempted() -> None:
    """None of them alone would free a block."""
    stage = Stage(num_blocks=7, max_num_seqs=4)
    stage.add(13, max_tokens=12)
    stage.add(9, max_tokens=8, n=3)
    stage.run()


def test_what_cannot_even_run_alone_is_refused() -> None:
    stage = Stage(num_blocks=8)
    stage.add(20, max_tokens=12)
    with pytest.raises(InvalidRequest) as refusal:
        stage.add(20, max_tokens=13)
    assert str(refusal.value) == (
        "prompt and answer of 33 tokens need 9 cache blocks, the cache has 8: shorten them or raise kv_cache_tokens"
    )
    assert stage.stats.num_refused == 1
    assert stage.stats.num_requests == 1
    stage.run()


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="the prompt is empty: give at least one token"):
        Stage().add(0)


def test_a_used_id_is_refused_and_free_again_after_the_end() -> None:
    stage = Stage()
    stage.add(3, id="same")
    with pytest.raises(InvalidRequest, match="request id 'same' is in use: give each request its own"):
        stage.add(3, id="same")
    stage.run()
    stage.add(3, id="same")
    stage.run()


def test_a_pooled_prompt_larger_than_a_step_is_refused() -> None:
    stage = Stage(max_num_batched_tokens=16)
    with pytest.raises(
        InvalidRequest,
        match="has 17 tokens and must be computed in one step of at most 16: shorten "
        "it or raise max_num_batched_tokens",
    ):
        stage.add(17, pool=True)


def test_a_pooled_prompt_needs_its_whole_windows() -> None:
    """It is computed in one step, so a window frees nothing meanwhile."""
    stage = Stage(window(4), num_blocks=4)
    stage.add(40, max_tokens=8)
    with pytest.raises(InvalidRequest, match="need 10 cache blocks, the cache has 4"):
        stage.add(40, pool=True)
    stage.add(16, pool=True)
    stage.run()


def test_a_window_model_takes_prompts_longer_than_its_cache() -> None:
    stage = Stage(window(6), num_blocks=4, max_num_batched_tokens=64)
    stage.add(60, max_tokens=20)
    stage.run()
