"""Structured outputs through the interfaces: every road, one answer, and how it ends."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from penstock.errors import InvalidRequest
from penstock.hub import list_models
from penstock.types import CompletionOutput
from tests.llm import tiny
from tests.llm.conftest import idle
from tests.llm.test_async import collect, serve
from tests.same_tokens import roads

PROMPT = "the answer is"
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"type": "string"}},
    "required": ["x", "name"],
    "additionalProperties": False,
}
JSON = StructuredOutputsParams(json=POINT)


def params(structure: StructuredOutputsParams = JSON, **values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "seed": 4, "structured_outputs": structure, **values})


def one(llm: LLM, structure: StructuredOutputsParams = JSON, **values: Any) -> CompletionOutput:
    return llm.generate(PROMPT, params(structure, **values), use_tqdm=False)[0].outputs[0]


def is_point(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"x", "name"} and type(value["x"]) is int and isinstance(value["name"], str)


def test_generate_chat_and_stream(text_llm: LLM) -> None:
    for seed in range(5):
        answer = one(text_llm, seed=seed)
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None) and is_point(answer.text)
        items = list(text_llm.stream(PROMPT, params(seed=seed)))
        assert "".join(item.text for item in items) == answer.text
        assert items[-1].finish_reason == "stop" and items[-1].forced_closing == answer.forced_closing
    chat = text_llm.chat([{"role": "user", "content": "a point"}], params(), use_tqdm=False)[0].outputs[0]
    assert is_point(chat.text)


def test_the_last_token_is_text_and_nothing_follows_it(text_llm: LLM) -> None:
    """No step is spent on an end-of-sequence token, also where those are ignored or where there are none."""
    for values in ({}, {"ignore_eos": True}, {"min_tokens": 50}, {"include_stop_str_in_output": True}):
        answer = one(text_llm, StructuredOutputsParams(choice=["yes, it is"]), **values)
        assert (answer.text, answer.finish_reason) == ("yes, it is", "stop")
        assert tiny.tokenizer().decode(answer.token_ids) == answer.text
        assert not answer.forced_closing


def test_a_short_budget_is_kept_and_said(text_llm: LLM) -> None:
    shown = [one(text_llm, max_tokens=most, seed=most) for most in range(26, 40)]
    assert all(answer.finish_reason == "stop" and is_point(answer.text) for answer in shown)
    assert any(answer.forced_closing for answer in shown)
    spacious = [one(text_llm, StructuredOutputsParams(regex="[a-z]{3}"), seed=seed) for seed in range(4)]
    assert not any(answer.forced_closing for answer in spacious)


def test_a_budget_that_nothing_fits_into_is_refused(text_llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens=2 is too small for any answer that matches: at least"):
        one(text_llm, StructuredOutputsParams(choice=["penstocks and turbines"]), max_tokens=2)
    with pytest.raises(InvalidRequest, match="Invalid type: nothing"):
        one(text_llm, StructuredOutputsParams(json={"type": "nothing"}))


def test_without_a_tokenizer_it_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs need a tokenizer"):
        llm.generate([1, 2, 3], params(), use_tqdm=False)


def test_siblings_have_their_own_place(text_llm: LLM) -> None:
    output = text_llm.generate(PROMPT, params(n=5, best_of=6), use_tqdm=False)[0]
    assert all(is_point(answer.text) for answer in output.outputs)
    assert len({answer.text for answer in output.outputs}) >= 4


def test_stop_strings_end_it_early(text_llm: LLM) -> None:
    whole = one(text_llm).text
    cut = one(text_llm, stop=['"name"'])
    assert (cut.text, cut.stop_reason) == (whole[: whole.index('"name"')], '"name"')


def test_greedy_rows_beside_it_are_as_without_it(text_llm: LLM) -> None:
    """Also once steps are replayed, for the plain row and for the row with a grammar."""
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    guided = params(temperature=0, max_tokens=30)
    apart = [text_llm.generate(PROMPT, each, use_tqdm=False)[0].outputs[0].token_ids for each in (plain, guided)]
    both = text_llm.generate([PROMPT, PROMPT], [plain, guided], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in both] == apart
    assert is_point(both[1].outputs[0].text)


PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15], [16, 17, 18, 19]]
MANY = [
    params(logprobs=1),
    params(StructuredOutputsParams(regex=r"\d{2,4}(,\d{2,4})*;"), logprobs=1, max_tokens=20),
    params(StructuredOutputsParams(json_object=True), logprobs=1, max_tokens=25, presence_penalty=0.5),
    params(logprobs=1, max_tokens=28, temperature=0),
]


@pytest.fixture(scope="module")
def wide(text_folder: str) -> Iterator[LLM]:
    with tiny.dummy(text_folder, skip_tokenizer_init=False) as model:
        yield model


def test_the_same_tokens_on_many_roads(wide: LLM, text_folder: str) -> None:
    """Together, chunked, with guesses, and preempted for want of rows and of memory."""
    truth = roads.alone(wide, PROMPTS, MANY)
    assert roads.together(wide, PROMPTS, MANY) == truth
    assert roads.chunked(wide, PROMPTS, MANY, seed=2) == truth
    assert roads.drafted(wide, PROMPTS, MANY, truth) == truth
    assert wide.stats()["num_accepted_tokens"] > 20
    idle(wide)
    with tiny.dummy(text_folder, skip_tokenizer_init=False, speculative_config="auto", max_num_seqs=8) as drafting:
        for _ in range(2):
            assert roads.together(roads.always(drafting), PROMPTS, MANY) == truth
        assert drafting.stats()["num_accepted_tokens"] > 20
    with tiny.dummy(text_folder, skip_tokenizer_init=False, max_num_seqs=2, scheduling_policy="priority") as narrow:
        assert roads.displaced(narrow, PROMPTS, MANY) == truth
        assert narrow.stats()["num_preemptions"] > 0


def test_async(text_folder: str, text_llm: LLM) -> None:
    expected = [one(text_llm, seed=seed).text for seed in range(4)]

    async def body(llm: AsyncLLM) -> list[str]:
        with pytest.raises(InvalidRequest, match="unclosed group"):
            await collect(llm.generate(PROMPT, params(StructuredOutputsParams(regex="(a"))))
        found = await asyncio.gather(*(collect(llm.generate(PROMPT, params(seed=seed))) for seed in range(4)))
        assert {reason for _, _, reason in found} == {"stop"}
        return [text for text, _, _ in found]

    assert serve(text_folder, body, skip_tokenizer_init=False) == expected


def test_a_grammar_that_fails_ends_its_answer_alone(text_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.sampling.grammar.matcher import GrammarFailed, GrammarMatcher

    advance = GrammarMatcher.advance

    def failing(self: GrammarMatcher, token: int) -> None:
        advance(self, token)
        if len(self._tokens) == 5 and re.match(rb"\d", self.lexicon.bytes_of(self._tokens)):
            raise GrammarFailed("the grammar cannot go on: out of fuel")

    monkeypatch.setattr(GrammarMatcher, "advance", failing)
    digits = params(StructuredOutputsParams(regex="[0-9]{20}"))
    outputs = text_llm.generate([PROMPT, PROMPT], [digits, params()], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error" and "out of fuel" in (outputs[0].error or "")
    assert is_point(outputs[1].outputs[0].text)


def test_smollm2_fills_in_a_form() -> None:
    """The model's own words, and a text of characters beyond ASCII."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["France", "Japan", "Perú"]}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    if not any(model.name == "smollm2" for model in list_models()):
        pytest.skip("smollm2 is not on this machine; penstock pull smollm2 fetches it")
    with LLM("smollm2", progress=False, max_model_len=512) as llm:
        answer = llm.chat(
            [{"role": "user", "content": "Which city is the capital of France? Reply in JSON."}],
            SamplingParams(temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(json=schema)),
            use_tqdm=False,
        )[0].outputs[0]
    value = json.loads(answer.text)
    assert "Paris" in value["city"] and value["country"] == "France"
