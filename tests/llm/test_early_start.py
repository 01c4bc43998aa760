"""A device that works beside the host begins with the first prompts while others are taken in."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.errors import InvalidRequest
from tests.llm import tiny

PROMPTS = [[(7 * number + at) % 250 for at in range(20 + number)] for number in range(9)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.write_config(tmp_path_factory.mktemp("early") / "model", vocab_size=300)


def made(folder: str, overlap: int = 1, **options: Any) -> LLM:
    llm = tiny.dummy(folder, max_num_batched_tokens=64, **options)
    llm.service.engine.overlap = overlap
    return llm


def watched(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many requests had come when each plan was started, and how many rows it has."""
    seen: list[tuple[int, int]] = []
    executor = llm.service.engine.executor
    start = executor.start

    def started(_: Any, plan: Any) -> Any:
        seen.append((llm.service.engine.scheduler.stats.num_requests, len(plan.rows)))
        return start(plan)

    monkeypatch.setattr(type(executor), "start", started)  # a closed runner has no attributes to restore
    return seen


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_the_first_step_is_started_before_all_prompts_have_come(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with made(folder, overlap=0) as plain:
        expected = answers(plain)
    with made(folder) as llm:
        seen = watched(llm, monkeypatch)
        assert answers(llm) == expected
        assert seen[0] == (4, 4) and seen[1][0] == len(PROMPTS)  # 20 + 21 + 22 tokens, and one of the fourth's


@pytest.mark.parametrize(("overlap", "policy"), [(0, "fcfs"), (1, "sjf"), (1, "lpm"), (1, "priority")])
def test_whoever_may_come_first_is_waited_for(
    folder: str, monkeypatch: pytest.MonkeyPatch, overlap: int, policy: str
) -> None:
    with made(folder, overlap, scheduling_policy=policy) as llm:
        seen = watched(llm, monkeypatch)
        answers(llm)
        assert seen[0][0] == len(PROMPTS)


def test_bad_input_after_the_start_leaves_nothing(folder: str) -> None:
    with made(folder) as llm:
        expected = answers(llm)
        with pytest.raises(InvalidRequest, match="token id 300"):
            llm.generate([*PROMPTS, [300]], GREEDY, use_tqdm=False)
        roster = llm.service.engine.scheduler.roster
        assert not roster.waiting and not roster.running and not llm.service.collectors
        assert answers(llm) == expected
        llm.service.engine.scheduler.check()


def test_prompts_that_fill_no_step_wait_for_each_other(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with made(folder) as llm:
        seen = watched(llm, monkeypatch)
        llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
        assert seen[0] == (2, 2)
