"""stream(): deltas as they are made, several at once, ended early, and interrupted."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import pytest

from penstock import LLM, PenstockError, SamplingParams
from penstock.runner.step import Step
from penstock.types import StreamDelta
from tests.llm import tiny

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def joined(deltas: list[StreamDelta]) -> tuple[str, list[int]]:
    return "".join(delta.text for delta in deltas), [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize(
    "values",
    [
        dict(temperature=0),
        dict(seed=3),
        dict(seed=4, stop=["e", "the "], min_tokens=4),
        dict(seed=5, max_tokens=1),
        dict(seed=6, detokenize=False),
    ],
    ids=str,
)
def test_deltas_sum_to_the_answer(text_llm: LLM, values: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 40, **values})
    for prompt in ("the cat", "one two three", "日本"):
        whole = text_llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        deltas = list(text_llm.stream(prompt, params))
        assert joined(deltas) == (whole.text, whole.token_ids)
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (whole.finish_reason, whole.stop_reason)
        assert {delta.num_prompt_tokens for delta in deltas} == {len(tiny.tokenizer().encode(prompt).ids)}


def test_siblings_are_told_apart(text_llm: LLM) -> None:
    params = SamplingParams(seed=1, n=3, max_tokens=12)
    whole = text_llm.generate("the", params, use_tqdm=False)[0].outputs
    deltas = list(text_llm.stream("the", params))
    for index, answer in enumerate(whole):
        assert joined([delta for delta in deltas if delta.index == index]) == (answer.text, answer.token_ids)


def test_tokens_come_one_step_at_a_time(llm: LLM) -> None:
    before = llm.stats()["num_steps"]
    for count, delta in enumerate(llm.stream([1, 2, 3], LONG), start=1):
        assert len(delta.token_ids) == 1 and llm.stats()["num_steps"] == before + count


def test_streams_side_by_side_lose_nothing(llm: LLM) -> None:
    """Each one's steps also advance the others, and a generate in between all of them."""
    prompts = [[1, 2, 3], [4, 5], [6]]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, LONG, use_tqdm=False)]
    streams = [llm.stream(prompt, LONG) for prompt in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    for i, stream in enumerate(streams):
        tokens[i].extend(next(stream).token_ids)
    assert llm.generate([7], LONG, use_tqdm=False)[0].outputs[0].token_ids
    for i in (2, 0, 1):
        tokens[i].extend(token for delta in streams[i] for token in delta.token_ids)
    assert tokens == expected


def test_closing_early_frees_the_blocks(llm: LLM) -> None:
    stream = llm.stream([1] * 40, LONG)
    next(stream)
    assert llm.stats()["num_running"] == 1 and llm.stats()["num_used_blocks"] > 0
    stream.close()  # type: ignore[attr-defined]
    assert llm.stats()["num_running"] == llm.stats()["num_used_blocks"] == 0
    for _ in llm.stream([1] * 40, LONG):
        break
    assert llm.stats()["num_used_blocks"] == 0
    unused = llm.stream([1] * 40, LONG)
    del unused
    assert llm.stats()["num_waiting"] == 0


def test_ctrl_c_in_a_step(config_folder: str, greedy: SamplingParams) -> None:
    """It is raised once the step has ended, ends the call, and leaves the LLM and other streams as they were."""
    with tiny.dummy(config_folder) as model:
        expected = model.generate([[1, 2], [3]], LONG, use_tqdm=False)
        other = model.stream([3], LONG)
        tokens = list(next(other).token_ids)
        steps = itertools.count()

        def interrupt(step: Step) -> None:
            if next(steps) == 5:
                signal.raise_signal(signal.SIGINT)

        with tiny.before_forward(model.service, interrupt), pytest.raises(KeyboardInterrupt):
            model.generate([[1, 2], [8, 9]], LONG, use_tqdm=False)
        assert model.stats()["num_running"] == 1 and model.stats()["num_failed_steps"] == 0
        model.service.engine.scheduler.check()
        tokens.extend(token for delta in other for token in delta.token_ids)
        assert tokens == expected[1].outputs[0].token_ids
        assert model.generate([[1, 2]], LONG, use_tqdm=False)[0].outputs == expected[0].outputs
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_between_steps(llm: LLM, greedy: SamplingParams) -> None:
    class Impatient:
        def __init__(self, **values: Any) -> None:
            self.closed = False

        def update(self, count: int) -> None:
            raise KeyboardInterrupt

        def close(self) -> None:
            self.closed = True

    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2] * 30], [greedy, LONG], use_tqdm=Impatient)
    assert llm.stats()["num_running"] == 0
    stream = llm.stream([1, 2, 3], LONG)
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert llm.stats()["num_running"] == 0
    assert len(llm.generate([1], greedy, use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_closed_while_streaming(config_folder: str) -> None:
    model = tiny.dummy(config_folder)
    stream = model.stream([1, 2, 3], LONG)
    next(stream)
    model.close()
    with pytest.raises(PenstockError, match="closed"):
        next(stream)
    model.close()
    for use in (
        lambda: model.generate([1]),
        lambda: model.stats(),
        lambda: model.tokenizer,
        lambda: next(model.stream([1])),
    ):
        with pytest.raises(PenstockError, match="this LLM is closed: make a new one"):
            use()


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_interrupt_while_a_prompt_is_taken_in(llm: LLM, greedy: SamplingParams, call: str) -> None:
    """It takes effect when the request is known to its caller, who can abort it."""
    take_in = llm.service.intake.request

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return take_in(*args, **kwargs)

    llm.service.intake.request = interrupted  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            if call == "generate":
                llm.generate([[1, 2, 3]], greedy, use_tqdm=False)
            else:
                next(iter(llm.stream([1, 2, 3], greedy)))
    finally:
        del llm.service.intake.request
    assert llm.stats()["num_waiting"] == llm.stats()["num_running"] == 0
