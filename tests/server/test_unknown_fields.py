"""Fields that a body does not know: passed over with a warning, unless they are misspelt or decide the answer."""

from __future__ import annotations

import json
import time
from typing import Any, get_type_hints

import pytest
from anthropic.types import message_create_params
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from penstock.server.anthropic.body import MessagesBody
from penstock.server.http.decode import decode
from penstock.server.http.errors import ApiError
from penstock.server.http.unknown_keys import DECISIVE, MAX_EDITS, MAX_KEYS, REAL, UnknownKeys, count_edits, find_meant
from penstock.server.ollama.bodies import OllamaChat, OllamaGenerate
from penstock.server.openai.chat_body import ChatBody
from penstock.server.openai.completions import CompletionBody
from penstock.server.responses.body import ResponsesBody
from penstock.server.tgi.routes import TgiBody

HI = [{"role": "user", "content": "hi"}]
LEAST: dict[type[BaseModel], dict[str, Any]] = {
    ChatBody: {"messages": HI},
    CompletionBody: {"prompt": "hi"},
    ResponsesBody: {"input": "hi"},
    MessagesBody: {"model": "m", "messages": HI, "max_tokens": 5},
    OllamaChat: {"messages": HI},
    OllamaGenerate: {"prompt": "hi"},
    TgiBody: {"inputs": "hi"},
}
CLIENTS = [
    chat_params.CompletionCreateParamsBase,
    completion_params.CompletionCreateParamsBase,
    response_create_params.ResponseCreateParamsBase,
    message_create_params.MessageCreateParamsBase,
]


def any_of(values: dict[str, Any]) -> dict[str, Any]:
    return values


def passed(asked: type[BaseModel] | None = None, *, refuses: bool = False, **more: Any) -> list[str]:
    """The keys that were passed over."""
    kind, unknown = asked or ChatBody, UnknownKeys(refuses)
    decode(bytearray(json.dumps({**LEAST[kind], **more}).encode()), kind, 1 << 20, unknown)
    return list(unknown.names)


def refusal(kind: type[BaseModel] | None = None, *, refuses: bool = False, **more: Any) -> ApiError:
    with pytest.raises(ApiError) as found:
        passed(kind, refuses=refuses, **more)
    assert found.value.status == 400
    return found.value


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
def test_an_unknown_field_is_passed_over(kind: type[BaseModel]) -> None:
    assert passed(kind, no_such_field=[{"a": 1}], xx=5) == ["no_such_field", "xx"]


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
def test_or_refused_where_the_server_is_told_so(kind: type[BaseModel]) -> None:
    error = refusal(kind, refuses=True, no_such_field=5)
    assert (error.message, error.param, error.code) == (
        "unknown parameter: 'no_such_field'",
        "no_such_field",
        "unknown_parameter",
    )


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("tempersture", "temperature"),
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("messges", "messages"),
        ("maxTokens", "max_tokens"),
        ("top-p", "top_p"),
        ("topP", "top_p"),
        ("modle", "model"),
        ("stpo", "stop"),
        ("sed", "seed"),
        ("strem", "stream"),
        ("mdoell", "model"),
        ("frequency_penality", "frequency_penalty"),
        ("responseFormat", "response_format"),
        ("max_competion_tokens", "max_completion_tokens"),
    ],
)
def test_a_misspelt_one_is_refused(key: str, meant: str) -> None:
    for refuses in (False, True):
        told = refusal(refuses=refuses, **any_of({key: 1})).message
        assert told == f"unknown parameter: {key!r}: did you mean {meant!r}?"
    assert passed(**any_of({key: None})) == []


@pytest.mark.parametrize("key", ["k", "nn", "p", "id", "tap", "abc", "stopwatch", "tools_config", "x" * 10_000])
def test_a_short_or_other_key_is_no_misspelling(key: str) -> None:
    assert passed(**any_of({key: 1})) == [key]


@pytest.mark.parametrize(
    ("place", "param"),
    [
        ({"messages": [{"role": "user", "contnt": "hi", "content": "ho"}]}, "messages.0.contnt"),
        ({"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]}, "tools.0.function.paramters"),
        ({"response_format": {"type": "json_schema", "json_scheme": {}}}, "response_format.json_scheme"),
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
    ],
)
def test_misspelt_inside(place: dict[str, Any], param: str) -> None:
    assert refusal(**place).param == param
    assert refusal(OllamaChat, options={"num_predct": 5}).param == "options.num_predct"
    assert refusal(TgiBody, parameters={"max_new_token": 5}).param == "parameters.max_new_token"


def test_unknown_inside() -> None:
    message: dict[str, Any] = {**HI[0], "timestamp": 5, "annotations": [], "refusal": None}
    tool = {"type": "function", "function": {"name": "f", "returns": {}}, "enabled": True}
    assert passed(messages=[message] * 50, tools=[tool]) == ["timestamp", "returns", "enabled"]
    assert passed(OllamaChat, options={"num_widgets": 1}) == ["num_widgets"]
    assert passed(refuses=True, messages=[message]) == ["timestamp"]  # what was said before is never refused


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
def test_no_field_of_another_api_is_a_misspelling(kind: type[BaseModel]) -> None:
    names = {*REAL, *(name for params in CLIENTS for name in get_type_hints(params))}
    assert len(names) > 250
    known = frozenset(field.alias or name for name, field in kind.model_fields.items())
    assert [name for name in sorted(names - known) if find_meant(name, known)] == []


@pytest.mark.parametrize("name", sorted(DECISIVE))
def test_what_decides_the_answer_is_refused(name: str) -> None:
    if name in ChatBody.model_fields:
        pytest.skip("it is understood")
    value: Any = False if name == "do_sample" else ["a"]
    error = refusal(**{name: value})
    assert error.message == f"{name} is not supported: {DECISIVE[name]}" and error.param == name
    assert passed(**any_of({name: True if name == "do_sample" else []})) == [name]


def test_names_of_other_dialects() -> None:
    assert refusal(ResponsesBody, max_tokens=5).message == "max_tokens is not supported: give max_output_tokens"
    assert refusal(ResponsesBody, response_format={"type": "json_object"}).message.endswith("give text.format")
    assert refusal(MessagesBody, stop=["a"]).message == "stop is not supported: give stop_sequences"
    assert passed(MessagesBody, seed=5, min_p=0.1) == ["seed", "min_p"]
    assert passed(ResponsesBody, top_k=5) == ["top_k"]


def test_the_warning_is_one_and_short() -> None:
    unknown = UnknownKeys()
    many = {f"{'x' * 200}{index}": index for index in range(10_000)}
    decode(bytearray(json.dumps({"messages": HI, **many}).encode()), ChatBody, 1 << 20, unknown)
    notice = unknown.make_warning()
    assert notice is not None and notice.endswith("... and more") and len(notice) < MAX_KEYS * 100
    assert UnknownKeys().make_warning() is None


def test_misspellings_are_looked_for_in_little_time() -> None:
    """Eight keys that are all but every field's, which no cache knows."""
    begun = time.process_time()
    passed(**any_of({f"zz{name[2:20]}{index}q": 1 for index, name in enumerate(sorted(ChatBody.model_fields)[:1000])}))
    assert time.process_time() - begun < 0.1


@pytest.mark.parametrize(
    ("one", "two", "edits"),
    [
        ("", "", 0),
        ("a", "a", 0),
        ("a", "", 1),
        ("ab", "ba", 1),
        ("abc", "cab", 2),
        ("temperature", "tempersture", 1),
        ("kitten", "sitting", 3),
        ("abcdef", "ghijkl", 3),
        ("ab", "abcdef", 3),
        ("top_k", "top_p", 1),
    ],
)
def test_edits(one: str, two: str, edits: int) -> None:
    assert count_edits(one, two) == count_edits(two, one) == min(edits, MAX_EDITS + 1)
