"""Thinking budgets in the Python interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams, StructuredOutputsParams
from penstock.errors import InvalidRequest
from tests.llm import tiny
from tests.server.test_thinking import HELLO, POINT, is_point, write_thinker

ASKED = StructuredOutputsParams(json=POINT)
OPEN = {"opens": True}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with tiny.dummy(str(write_thinker(tmp_path_factory.mktemp("thinker"))), skip_tokenizer_init=False) as llm:
        yield llm


def answer(llm: LLM, budget: int | None, **values: Any) -> str:
    params = SamplingParams(**{"max_tokens": 100, "seed": 1, "thinking_token_budget": budget, **values})
    return llm.chat(HELLO, params, use_tqdm=False, chat_template_kwargs=OPEN)[0].outputs[0].text


def test_it_thinks_first_where_a_budget_says_that_it_may(thinker: LLM) -> None:
    thought, end, said = answer(thinker, 12, structured_outputs=ASKED).partition("</think>")
    assert end and is_point(said) and thought.endswith("\n")
    assert is_point(answer(thinker, None, structured_outputs=ASKED))  # as ever: the whole text matches
    assert "</think>" in answer(thinker, 3, ignore_eos=True)


def test_prompts_that_open_the_block_themselves(thinker: LLM) -> None:
    params = SamplingParams(max_tokens=90, seed=1, thinking_token_budget=5, structured_outputs=ASKED)
    tokens = tiny.tokenizer().encode("hello").ids + [300]
    for prompt in ("hello<think>", tokens):
        output = thinker.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        assert is_point(output.text.partition("</think>")[2]) and output.token_ids[6] == 301
    items = list(thinker.stream("hello<think>", params))
    assert is_point("".join(item.text for item in items).partition("</think>")[2])


def test_models_without_reasoning_have_no_budget(text_llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="marks no reasoning"):
        text_llm.generate("hello", SamplingParams(thinking_token_budget=4), use_tqdm=False)
    with tiny.dummy(tiny.write_config(tmp_path)) as ids, pytest.raises(InvalidRequest, match="needs a tokenizer"):
        ids.generate([[1, 2]], SamplingParams(thinking_token_budget=4), use_tqdm=False)
