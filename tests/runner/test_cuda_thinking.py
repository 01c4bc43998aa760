"""Budgets of thinking with the GPU's runner: the same answers as a CPU's, and no step that waits while none ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from penstock import LLM, SamplingParams, StructuredOutputsParams
from tests.runner.test_cuda_runner import StepTicket, answers, engines, no_gpu, pytestmark  # noqa: F401
from tests.server.test_thinking import write_thinker

OPEN, SHUT = [5, 6, 300], [5, 6, 7]  # the first ends with the opening marker


def asking(budget: int | None, **more: Any) -> SamplingParams:
    values: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "thinking_token_budget": budget}
    return SamplingParams(**{**values, **more})


def compare(usual: LLM, other: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    found = answers(other, prompts, params)
    assert found == answers(usual, prompts, params)
    return found


def test_budgets_end_on_the_device(tmp_path: Path, no_gpu: None) -> None:  # noqa: F811
    point = StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}, "minItems": 2})
    with engines(str(write_thinker(tmp_path)), skip_tokenizer_init=False) as (usual, other):
        kinds: list[tuple[list[int], SamplingParams]] = [
            (OPEN, asking(0)),
            (OPEN, asking(7)),
            (OPEN, asking(9, n=2)),
            (SHUT, asking(3)),
            (SHUT, asking(3, logit_bias={300: 50.0}, repetition_penalty=1.2)),
            (OPEN, asking(4, structured_outputs=point, max_tokens=50)),
            (OPEN, asking(200, structured_outputs=point, max_tokens=50)),
            (OPEN, asking(None)),
        ]
        found = compare(usual, other, *map(list, zip(*kinds)))
        ids = [found[at][0][0] for at in range(len(kinds))]
        assert [ids[at][budget + 1] for at, budget in ((0, 0), (1, 7), (2, 9), (5, 4))] == [301] * 4
        assert 301 in ids[4] and 301 in ids[6] and 301 not in ids[7]


def test_no_step_waits_for_the_one_before_until_a_budget_may_end(tmp_path: Path, no_gpu: None) -> None:  # noqa: F811
    with engines(str(write_thinker(tmp_path)), skip_tokenizer_init=False) as (_, other):

        def num_waits(budget: int | None) -> int:
            with mock.patch.object(StepTicket, "arrive", autospec=True, side_effect=StepTicket.arrive) as arrive:
                other.generate([OPEN], asking(budget, max_tokens=30), use_tqdm=False)
            return int(arrive.call_count)

        assert num_waits(1000) == num_waits(None) < num_waits(10) <= num_waits(None) + 4  # of 30 tokens
