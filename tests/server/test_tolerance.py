"""Fields by the names that llama-server, Ollama, TGI and huggingface_hub have for them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from penstock.server.common.fields import SamplingBody, make_sampling_params
from penstock.server.common.structured_outputs import read_constraint
from penstock.server.http.errors import make_body_error
from penstock.server.openai.chat_body import ChatBody
from penstock.server.openai.completions import CompletionBody
from penstock.types import SamplingParams, StructuredOutputsParams

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(**values: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": HI, **values})


def completion(**values: Any) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": "hi", **values})


def params(body: ChatBody | CompletionBody) -> SamplingParams:
    return make_sampling_params(body, SamplingParams(max_tokens=7, seed=3), max_tokens=body.max_tokens, logprobs=None)


def refusal(**values: Any) -> str:
    with pytest.raises(ValidationError) as found:
        chat(**values)
    return make_body_error(found.value).message


@pytest.mark.parametrize("make", [chat, completion])
def test_a_negative_length_is_as_many_as_fit(make: Any) -> None:
    for values in ({"max_tokens": -1}, {"n_predict": -1}, {"n_predict": -2}):
        assert params(make(**values)).max_tokens is None
    assert params(make(n_predict=5)).max_tokens == 5


def test_lengths_that_are_none() -> None:
    assert chat(max_completion_tokens=-1).max_completion_tokens == -1
    for values in ({"max_tokens": 0}, {"max_tokens": -3}, {"max_completion_tokens": 0}, {"n_predict": 0}):
        assert refusal(**values).startswith(next(iter(values)))


def test_synonyms() -> None:
    assert params(chat(repeat_penalty=1.3)).repetition_penalty == 1.3
    assert params(chat(repeat_penalty=1.3, repetition_penalty=1.3)).repetition_penalty == 1.3
    assert "mean the same: give one of them" in refusal(repeat_penalty=1.3, repetition_penalty=1.2)
    assert "mean the same: give one of them" in refusal(n_predict=5, max_tokens=6)


def test_probabilities_as_llama_server_asks_for_them() -> None:
    body = chat(n_probs=3)
    assert (body.logprobs, body.top_logprobs) == (True, 3)
    assert completion(n_probs=3).logprobs == 3
    assert chat(n_probs=0).logprobs is None and chat(n_probs=3, logprobs=False).logprobs is False


def test_a_seed_of_minus_one_is_another_each_time() -> None:
    assert params(chat(seed=-1)).seed == 3  # the model's own, as where none is given
    assert params(chat(seed=-2)).seed == -2


SAMPLERS: dict[str, Any] = {
    "repeat_last_n": 64,
    "dry_multiplier": 0.8,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 100,
    "dry_sequence_breakers": ("\n", "x"),
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "mirostat": 2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
    "top_n_sigma": 1.0,
    "dynatemp_range": 0.3,
    "dynatemp_exponent": 2.0,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_have_their_values(name: str) -> None:
    value = list(SAMPLERS[name]) if isinstance(SAMPLERS[name], tuple) else SAMPLERS[name]
    assert getattr(params(chat(**{name: value})), name) == SAMPLERS[name]


def test_samplers_that_are_not_named_are_off() -> None:
    given: dict[str, Any] = {
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.1,
        "typical_p": 0.5,
        "temperature": 0.5,
        "repeat_penalty": 1.5,
        "xtc_probability": 0.5,
        "top_n_sigma": 1.0,
        "dry_multiplier": 1.0,
    }
    for named in (["top_k", "temperature"], "kt"):
        found = params(chat(**given, samplers=named))
        assert found == params(chat(top_k=5, temperature=0.5))
    default = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature", "infill"]
    assert params(chat(**given, samplers=default)) == params(chat(**given))
    with pytest.raises(ValueError, match="samplers: 'no' is none of penalties, dry"):
        params(chat(samplers=["no"]))


def test_biases_as_llama_server_has_them() -> None:
    assert params(chat(logit_bias=[[5, 1.5], [6, False]])).logit_bias == {5: 1.5, 6: -100.0}
    assert refusal(logit_bias=[[5]]).startswith("logit_bias=[[5]]: Input should be an object, or a list of")
    assert "the limit is 10000" in refusal(logit_bias=[[5, 1]] * 10_001)
    with pytest.raises(ValueError, match="is not a token id"):
        params(chat(logit_bias=[["Hello", 1]]))


def test_every_sampling_value_has_a_field() -> None:
    of_python = {"detokenize", "guided_decoding", "logits_processors", "output_kind"}
    elsewhere = {"best_of", "max_tokens", "logprobs", "structured_outputs", "thinking_token_budget"}
    own = set(SamplingParams.__dataclass_fields__) - of_python - elsewhere
    assert own <= set(SamplingBody.model_fields)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"type": "json_object", "value": SCHEMA}, {"json": SCHEMA}),
        ({"type": "json", "value": SCHEMA}, {"json": SCHEMA}),
        ({"type": "json_object", "schema": SCHEMA}, {"json": SCHEMA}),
        ({"type": "json_schema", "schema": SCHEMA}, {"json": SCHEMA}),
        ({"type": "json_schema", "value": {"name": "a", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "regex", "value": "[ab]+"}, {"regex": "[ab]+"}),
    ],
)
def test_response_format(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    found = read_constraint(chat(response_format=asked))
    wanted = StructuredOutputsParams(**expected)
    assert found is not None
    assert (found.json, found.regex, found.json_object) == (wanted.json, wanted.regex, wanted.json_object)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"type": "json"}, "value"),
        ({"type": "regex", "value": {}}, "value"),
        ({"type": "json_schema"}, "json_schema.schema"),
    ],
)
def test_response_format_without_its_source(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"response_format of type {asked['type']} needs {told}: give the"):
        read_constraint(chat(response_format=asked))


@pytest.mark.parametrize("make", [chat, completion])
def test_forms_as_llama_server_asks_for_them(make: Any) -> None:
    grammar, schema = read_constraint(make(grammar='root ::= "a"')), read_constraint(make(json_schema=SCHEMA))
    assert grammar is not None and grammar.grammar == 'root ::= "a"'
    assert schema is not None and schema.json == StructuredOutputsParams(json=SCHEMA).json
    assert read_constraint(make(grammar="")) is None
    with pytest.raises(ValueError, match="grammar and json_schema each constrain the output"):
        read_constraint(make(grammar='root ::= "a"', json_schema={}))
