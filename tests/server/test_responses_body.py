"""The bodies of /v1/responses: every field of OpenAI's own client is honoured, refused with a reason, or known to have
no effect."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from openai.types.responses import response_create_params
from pydantic import ValidationError

from penstock.server.http.errors import ApiError, make_body_error
from penstock.server.openai.chat_body import ChatBody
from penstock.server.responses.background import ResponseStore
from penstock.server.responses.body import InputMessage, ResponsesBody
from penstock.server.responses.routes import to_chat

HELLO = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}, "strict": True}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}

# a field's value, and what it makes of the chat body
HONOURED: dict[str, tuple[Any, dict[str, Any]]] = {
    "input": (
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
        {"messages": [HELLO]},
    ),
    "include": (["message.output_text.logprobs"], {"logprobs": True, "top_logprobs": 0}),
    "instructions": ("Be brief.", {"messages": [{"role": "system", "content": "Be brief."}, HELLO]}),
    "max_output_tokens": (7, {"max_completion_tokens": 7}),
    "model": ("m", {"model": "m"}),
    "parallel_tool_calls": (False, {"parallel_tool_calls": False}),
    "reasoning": ({"effort": "none", "summary": "auto"}, {"reasoning_effort": "none"}),
    "stream": (True, {"stream": True}),
    "temperature": (0.5, {"temperature": 0.5}),
    "text": (
        {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}},
    ),
    "tool_choice": ("none", {"tool_choice": "none"}),
    "tools": ([TOOL], {"tools": [CHAT_TOOL]}),
    "top_logprobs": (3, {"logprobs": True, "top_logprobs": 3}),
    "top_p": (0.9, {"top_p": 0.9}),
    "user": ("u", {"user": "u"}),
}
# honoured by the routes, not by the chat body
ELSEWHERE: dict[str, Any] = {
    "background": True,
    "metadata": {"a": "b"},
    "previous_response_id": "resp_1",
    "store": False,
    "truncation": "auto",
}
NO_EFFECT: dict[str, Any] = {
    "access_programs": {"cyber": "standard"},
    "image": {"context_compression": "auto"},
    "max_tool_calls": 3,
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "service_tier": "auto",
    "stream_options": {"include_obfuscation": True},
}
REFUSED: dict[str, Any] = {
    "context_management": [{"type": "compaction"}],
    "conversation": "conv_1",
    "moderation": {"model": "omni"},
    "prompt": {"id": "p"},
}


def fields() -> list[str]:
    kinds = (
        response_create_params.ResponseCreateParamsNonStreaming,
        response_create_params.ResponseCreateParamsStreaming,
    )
    return sorted({name for kind in kinds for name in get_type_hints(kind)})


def chat(**values: Any) -> ChatBody:
    return to_chat(ResponsesBody.model_validate_json(json.dumps({"input": "Hello", **values})))


def told(body: ChatBody) -> dict[str, Any]:
    return body.model_dump(exclude_none=True, exclude_unset=True, by_alias=True)


def refusal(**values: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        ResponsesBody.model_validate_json(json.dumps({"input": "Hello", **values}))
    return make_body_error(caught.value).message


@pytest.mark.parametrize("name", fields())
def test_every_field_of_the_client(name: str) -> None:
    if name in HONOURED:
        value, expected = HONOURED[name]
        found = told(chat(**{name: value}))
        assert {key: found.get(key) for key in expected} == expected
    elif name in REFUSED:
        assert refusal(**{name: REFUSED[name]}).startswith(f"{name} is not supported: ")
    else:
        assert told(chat(**{name: {**ELSEWHERE, **NO_EFFECT}[name]})) == told(chat())


def test_an_unknown_key_is_named() -> None:
    assert "'max_tokens'" in refusal(max_tokens=5)


def test_a_round_of_tools() -> None:
    body = chat(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "Use tools."},
            HELLO,
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Look."}],
            },
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "One moment.", "annotations": []}],
            },
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "call_2", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
            {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "rain"}]},
        ],
    )
    call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert [message.to_template() for message in body.messages] == [
        {"role": "system", "content": "Be brief.\nUse tools."},
        HELLO,
        {
            "role": "assistant",
            "content": "One moment.",
            "reasoning_content": "Look.",
            "tool_calls": [{"id": "call_1", **call}, {"id": "call_2", **call}],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1", "name": "weather"},
        {"role": "tool", "content": "rain", "tool_call_id": "call_2", "name": "weather"},
    ]


def test_allowed_tools_narrow_the_choice_alone() -> None:
    other = {**TOOL, "name": "time"}
    body = told(
        chat(
            tools=[other, TOOL],
            tool_choice={
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "weather"}],
            },
        )
    )
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    assert body["tools"][1] == CHAT_TOOL and len(body["tools"]) == 2  # the prompt stays the same
    assert body["tool_choice"] == {"type": "allowed_tools", "allowed_tools": allowed}
    named = told(chat(tools=[other, TOOL], tool_choice={"type": "function", "name": "weather"}))
    assert named["tool_choice"] == {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "describe the image"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "send the item itself"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "'web_search_call' is not supported"),
        ({"input": []}, "input is needed"),
        ({"tools": [{"type": "web_search"}]}, "tools of type 'web_search' are not supported"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice of type 'mcp' is not supported"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}},
            "tool_choice names 'x', not among the tools",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "needs a schema"),
        ({"top_logprobs": 21}, "top_logprobs=21"),
    ],
)
def test_refusals_say_why(values: dict[str, Any], reason: str) -> None:
    assert reason in refusal(**values)


def response(id: str, text: str = "Hi") -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": id, "output": [{"type": "message", "role": "assistant", "content": content}]}


def test_the_store_forgets_the_oldest_and_knows_its_tenants() -> None:
    store = ResponseStore(max_responses=2)
    hello = [InputMessage(role="user", content="Hello")]
    for id in ("a", "b", "c"):
        store.put("one", response(id), hello)
    store.put("two", response("d"), hello)
    assert [getattr(item, "role", None) for item in store.find("one", "c").list_items()] == ["user", "assistant"]
    store.delete("one", "b")
    for tenant, id in (("one", "a"), ("one", "b"), ("one", "d"), ("two", "c")):
        with pytest.raises(ApiError, match="not stored"):
            store.find(tenant, id)


def test_the_store_keeps_within_its_bytes() -> None:
    store = ResponseStore(max_bytes=2000)
    store.put("", response("huge", "x" * 3000), [])
    store.put("", response("a", "x" * 1000), [])
    store.put("", response("b", "x" * 1000), [])
    store.find("", "b")
    for id in ("huge", "a"):
        with pytest.raises(ApiError):
            store.find("", id)
