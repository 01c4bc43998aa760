"""How answers end: stop tokens, lengths, minimum lengths, aborts."""

from __future__ import annotations

import pytest

from penstock.engine.sequence import Status
from tests.engine.stage import FULL, STATE, Stage, window
from tests.simulation.forward import Drafting


def answer(prompt: int = 6, max_tokens: int = 12) -> list[int]:
    """What the first request of a stage answers when nothing stops it."""
    stage = Stage()
    stage.add(prompt, max_tokens=max_tokens)
    stage.run()
    return [token for delta in stage.deltas for token in delta.tokens]


def test_max_tokens_ends_with_length() -> None:
    stage = Stage()
    stage.add(6, max_tokens=5)
    stage.run()
    assert [len(delta.tokens) for delta in stage.deltas] == [1] * 5
    assert (stage.deltas[-1].finish_reason, stage.deltas[-1].stop_reason) == ("length", None)


def test_a_stop_token_ends_and_is_named() -> None:
    tokens = answer()
    stage = Stage()
    stage.add(6, max_tokens=12, stop_token_ids=[tokens[4]])
    stage.run()
    assert [token for delta in stage.deltas for token in delta.tokens] == tokens[: tokens.index(tokens[4]) + 1]
    assert (stage.deltas[-1].finish_reason, stage.deltas[-1].stop_reason) == ("stop", tokens[4])


def test_the_end_of_text_ends_without_a_name() -> None:
    tokens = answer()
    stage = Stage()
    stage.add(6, max_tokens=12, eos_token_ids=(tokens[4],))
    stage.run()
    assert (stage.deltas[-1].finish_reason, stage.deltas[-1].stop_reason) == ("stop", None)
    ignoring = Stage()
    ignoring.add(6, max_tokens=12, eos_token_ids=(tokens[4],), ignore_eos=True)
    ignoring.run()
    assert ignoring.stats.num_output_tokens == 12


def test_nothing_stops_before_min_tokens() -> None:
    tokens = answer()
    place = tokens.index(tokens[4])
    for least, length in ((0, place + 1), (place, place + 1), (place + 1, 12)):
        stage = Stage()
        stage.add(6, max_tokens=12, min_tokens=least, stop_token_ids=[tokens[4]])
        stage.run()
        expected = length if tokens.count(tokens[4]) == 1 or least <= place else None
        assert expected is None or stage.stats.num_output_tokens == expected


def test_a_stop_among_accepted_drafts_cuts_the_rest() -> None:
    tokens = answer()
    stage = Stage(drafting=Drafting(rate=1.0, longest=8, accuracy=1.0))
    stage.add(6, max_tokens=12, stop_token_ids=[tokens[4]], logprobs=0)
    stage.run()
    assert [token for delta in stage.deltas for token in delta.tokens] == tokens[: tokens.index(tokens[4]) + 1]
    assert all(len(delta.logprobs) == len(delta.tokens) for delta in stage.deltas)


@pytest.mark.parametrize("overlap", [1, 3])
def test_plans_started_beyond_the_end_are_void(overlap: int) -> None:
    tokens = answer()
    stage = Stage(overlap=overlap)
    stage.add(6, max_tokens=12, stop_token_ids=[tokens[4]])
    stage.run()
    assert stage.stats.num_steps > tokens.index(tokens[4]) + 1
    assert stage.stats.num_output_tokens == tokens.index(tokens[4]) + 1


def test_abort_of_a_waiting_request() -> None:
    stage = Stage(max_num_seqs=1)
    stage.add(4, max_tokens=8)
    waiting = stage.add(4)
    stage.step()
    deltas = stage.abort(waiting)
    assert [(delta.finish_reason, delta.sibling) for delta in deltas] == [("abort", 0)]
    assert stage.stats.num_aborted == 1
    stage.run()
    assert stage.finished() == [waiting.id, "r1"]


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("steps", [1, 2, 6])
def test_abort_gives_everything_back_within_one_step(overlap: int, steps: int) -> None:
    """In the middle of the prompt, at its end, and in the answer, with plans started or not."""
    stage = Stage(FULL, window(6), STATE, max_num_batched_tokens=8, overlap=overlap)
    request = stage.add(20, max_tokens=20, n=2)
    stage.step(steps)
    stage.abort(request)
    assert not stage.scheduler.has_work
    assert stage.cache.pool.num_used == 0
    assert len(stage.scheduler.roster.rows) == 8
    assert (stage.cache.pool.num_limbo > 0) == bool(stage.device.unfinished)
    while stage.engine.has_work:
        assert stage.step() == []
    assert stage.cache.pool.num_limbo == 0


def test_abort_of_one_sibling_leaves_the_others() -> None:
    stage = Stage()
    request = stage.add(6, max_tokens=6, n=3)
    stage.step(3)
    stage.abort(request, 1)
    assert [s.status for s in stage.sequences(request)] == [Status.RUNNING, Status.FINISHED, Status.RUNNING]
    stage.run()
    ends = {delta.sibling: delta.finish_reason for delta in stage.deltas if delta.finish_reason}
    assert ends == {0: "length", 1: "abort", 2: "length"}


def test_abort_of_nobody_does_nothing() -> None:
    stage = Stage()
    request = stage.add(4)
    assert stage.engine.abort("nobody") == []
    assert stage.engine.abort(request.id, 7) == []
    stage.run()
    assert stage.engine.abort(request.id) == []


def test_who_waits_for_an_aborted_prefix_computes_it() -> None:
    stage = Stage(max_num_batched_tokens=8)
    first = stage.add(list(range(24)))
    second = stage.add([*range(24), 1])
    stage.step()
    assert stage.sequences(second)[0].status is Status.WAITING
    stage.abort(first)
    stage.step()
    assert stage.sequences(second)[0].status is Status.RUNNING
    stage.run()


def test_close_waits_for_started_plans() -> None:
    stage = Stage(overlap=2)
    stage.add(4, max_tokens=9)
    stage.step()
    stage.engine.close()
    assert stage.device.closed and not stage.device.unfinished
