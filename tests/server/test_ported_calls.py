"""Calls as other servers' users make them: nulls, names, addresses."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from penstock.server.catalog import is_generic_name
from penstock.server.http.errors import make_body_error
from penstock.server.ollama.bodies import OllamaChat, OllamaGenerate
from penstock.server.openai.chat_body import ChatBody, NamedChoice
from penstock.server.openai.completions import CompletionBody
from penstock.server.responses.body import ResponsesBody
from penstock.server.tgi.routes import TgiBody
from tests.server.running import RunningServer

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "body, needed",
    [
        (ChatBody, {"messages": HI}),
        (CompletionBody, {"prompt": "hi"}),
        (ResponsesBody, {"input": "hi"}),
        (OllamaChat, {"model": "a"}),
        (OllamaGenerate, {"model": "a"}),
        (TgiBody, {"inputs": "hi"}),
    ],
)
def test_null_is_the_same_as_nothing(body: type[BaseModel], needed: dict[str, Any]) -> None:
    """Many clients write null for all that is not set."""
    nulls = {field.alias or name: None for name, field in body.model_fields.items() if name not in needed}
    assert body.model_validate({**nulls, **needed}).model_dump() == body.model_validate(needed).model_dump()


def test_a_null_that_is_needed() -> None:
    with pytest.raises(ValueError, match="messages"):
        ChatBody.model_validate({"messages": None})


def test_an_assistant_or_a_tool_may_have_said_nothing() -> None:
    for role in ("assistant", "tool"):
        assert ChatBody.model_validate({"messages": [*HI, {"role": role, "content": None}]}).messages[1].content is None
    with pytest.raises(ValueError, match="a message of role user needs content"):
        ChatBody.model_validate({"messages": [{"role": "user", "content": None}]})


def test_a_forced_tool_without_its_type() -> None:
    """As huggingface_hub sends it."""
    tool = {"type": "function", "function": {"name": "f"}}
    body = ChatBody.model_validate({"messages": HI, "tools": [tool], "tool_choice": {"function": {"name": "f"}}})
    assert isinstance(body.tool_choice, NamedChoice) and body.tool_choice.function.name == "f"


@pytest.mark.parametrize("name", ["o3", "o4-mini", "o1-preview", "davinci-002"])
def test_openais_other_names(name: str) -> None:
    assert is_generic_name(name)
    assert not is_generic_name(f"x{name}")


@pytest.mark.parametrize(
    "path, advice",
    [
        ("/batches", "did you mean /v1/batches?"),
        ("/v1/api/chat", "did you mean /api/chat?"),
        ("/v1/v1/completions", "did you mean /v1/completions?"),
        ("/nowhere", "see /docs for all routes"),
    ],
)
def test_an_address_with_too_much_or_too_little(server: RunningServer, path: str, advice: str) -> None:
    answer = httpx.post(server.url + path, json={})
    assert answer.status_code == 404
    assert f"no route POST {path}: {advice}" in answer.text


@pytest.mark.parametrize(
    "body, values, place",
    [
        (ChatBody, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (CompletionBody, {"prompt": 5}, "prompt"),
        (ChatBody, {"messages": HI, "documents": [5]}, "documents.0"),
    ],
)
def test_a_place_has_the_names_of_the_body(body: type[BaseModel], values: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError) as found:
        body.model_validate(values)
    told = make_body_error(found.value)
    assert (told.param, told.message) == (place, f"{place}=5: Input should be a valid string")


def test_the_greatest_effort() -> None:
    assert ChatBody.model_validate({"messages": HI, "reasoning_effort": "max"}).reasoning_effort == "max"
