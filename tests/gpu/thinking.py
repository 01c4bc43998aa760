"""Budgets of thinking: the device writes the end marker when they are used up, and a step waits for no other before."""

from __future__ import annotations

import time
from typing import Any

from penstock import LLM, SamplingParams
from penstock.sampling.grammar.compiler import GrammarCompiler
from penstock.sampling.grammar.lexicon import Lexicon
from penstock.types import ReasoningBlock
from tests.gpu.answers import ask, ids, prompts
from tests.gpu.check import Figures, check, require
from tests.gpu.models import engine, made

BEGIN, END = 300, 301
PLAIN = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)


def _teach(llm: LLM) -> None:
    """A vocabulary for a model without a tokenizer; its prompts have opened the block."""
    spelled = [bytes([id]) if id < 256 else b"" for id in range(1024)]
    lexicon = Lexicon(spelled, {BEGIN: b"<think>", END: b"</think>"}, lambda text: list(text.encode()))
    service: Any = llm.service
    service.engine.executor.rows.grammars = GrammarCompiler(lambda: lexicon)
    service._find_block = lambda encoded, params: (
        None if params.thinking_token_budget is None else ReasoningBlock("<think>", "</think>", is_open=True)
    )


def _seconds(llm: LLM, params: list[SamplingParams]) -> float:
    given = prompts(*[9] * len(params))
    ask(llm, given, params)
    times = []
    for _ in range(3):  # steps are recorded when they come again
        begin = time.perf_counter()
        ask(llm, given, params)
        times.append(time.perf_counter() - begin)
    return min(times)


@check()
def thinking_ends_by_its_budget() -> Figures:
    given = prompts(9, 20, 33, 12)
    with engine(made("LlamaForCausalLM").folder) as llm:
        _teach(llm)
        plain = ids(ask(llm, given, [PLAIN] * 4))
        budgets = [0, 7, None, 500]
        found = ids(ask(llm, given, [PLAIN.clone(thinking_token_budget=budget) for budget in budgets]))
        for row, budget in ((0, 0), (1, 7)):
            require(found[row][:budget] == plain[row][:budget], "reasoning within its budget is another")
            require(found[row][budget : budget + 2] == [10, END], f"it does not end: {found[row]}")
        require(found[2:] == plain[2:], "an answer whose budget is not used up is another")
        rows = [PLAIN.clone(max_tokens=256)] * 32
        times = {
            name: _seconds(llm, [one.clone(thinking_token_budget=budget) for one in rows])
            for name, budget in (("without", None), ("far", 2000), ("after 100", 100))
        }
    return times
