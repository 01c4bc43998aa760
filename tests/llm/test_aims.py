"""Aims for latency in the Python interface: prompts come in chunks, answers stay the same."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.engine.plan import Plan
from penstock.engine.scheduling.prompt_cap import PromptCap
from tests.llm import tiny

NUM_PROMPTS = 24


def answer(llm: LLM) -> tuple[list[tuple[int, ...]], list[int]]:
    """The answers to prompts that arrive while others decode, and the prompt tokens of steps with decode rows."""
    service, counts = llm.service, []
    watch = service.engine.watch
    assert watch is not None

    def note(plan: Plan) -> None:
        watch(plan)
        num_decode = sum(row.count == 1 for row in plan.rows)
        if num_decode and plan.num_tokens > num_decode:
            counts.append(plan.num_tokens - num_decode)

    service.engine.watch = note
    prompts = [[(7 * number + place) % 90 + 5 for place in range(60)] for number in range(NUM_PROMPTS)]
    params = [SamplingParams(max_tokens=20 + 3 * number, ignore_eos=True) for number in range(NUM_PROMPTS)]
    outputs: Any = llm.generate(prompts, params, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs], counts


def test_an_aim_changes_no_answer(config_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven prompt tokens beside decode rows, whatever this machine's steps take."""
    monkeypatch.setattr(PromptCap, "choose", lambda self, num_decode, backlog: 7 if num_decode else None)
    options = dict(max_num_seqs=4, max_num_batched_tokens=128, enable_prefix_caching=False)
    with tiny.dummy(config_folder, **options) as plain, tiny.dummy(config_folder, tpot_slo_ms=5, **options) as aiming:
        expected, free = answer(plain)
        found, capped = answer(aiming)
    assert found == expected
    assert max(free) >= 60 and max(capped) == 7
