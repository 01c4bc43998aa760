"""Callables that change a row's logits: the host chooses that row's tokens, and others notice by the clock alone."""

from __future__ import annotations

import time

import torch

from penstock import LLM, SamplingParams
from tests.gpu.answers import ask, ids, prompts
from tests.gpu.check import Figures, check, require
from tests.gpu.models import engine, made

NUM_TOKENS = 24
PLAIN = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)


def count_up(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    wanted = torch.full_like(logits, -torch.inf)
    wanted[len(output) + 5] = 0
    return wanted


def no_change(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits


def broken(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(output) == 3:
        raise KeyError("no such token")
    return logits


def _seconds(llm: LLM, params: list[SamplingParams]) -> float:
    given = prompts(*[9] * len(params))
    ask(llm, given, params)
    begin = time.perf_counter()
    ask(llm, given, params)
    return time.perf_counter() - begin


@check()
def processors_change_their_own_rows() -> Figures:
    given = prompts(9, 20, 33, 12)
    with engine(made("LlamaForCausalLM").folder) as llm:
        plain = ids(ask(llm, given, [PLAIN] * 4))
        each = [PLAIN.clone(logits_processors=[count_up]), PLAIN, PLAIN.clone(logits_processors=[no_change]), PLAIN]
        found = ids(ask(llm, given, each))
        require(found[0] == list(range(5, 5 + NUM_TOKENS)), f"the callable did not decide: {found[0]}")
        require(found[1:] == plain[1:], "a neighbour, or a callable that changes nothing, changed an answer")
        outputs = llm.generate(given, [PLAIN.clone(logits_processors=[broken]), PLAIN, PLAIN, PLAIN], use_tqdm=False)
        require("KeyError: 'no such token'" in (outputs[0].error or ""), f"not told: {outputs[0].error}")
        require([output.outputs[0].token_ids for output in outputs[1:]] == plain[1:], "a failure spread")
        rows = [PLAIN.clone(max_tokens=64)] * 32
        alone, beside = _seconds(llm, rows), _seconds(llm, [*rows[1:], rows[0].clone(logits_processors=[no_change])])
    return {"32 rows": alone, "one with a callable": beside}
