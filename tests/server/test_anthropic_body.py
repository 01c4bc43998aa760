"""Anthropic's bodies: every field of its own client is honoured, refused with a reason, or known to have no effect."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from pydantic import ValidationError

from penstock.server.anthropic.body import CountTokensBody, MessagesBody
from penstock.server.anthropic.routes import to_chat
from penstock.server.http.errors import make_body_error
from penstock.server.openai.chat_body import ChatBody

HELLO = {"role": "user", "content": "Hello"}
TOOL = {"name": "weather", "description": "The weather", "input_schema": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}

# a field's value, and what it makes of the chat body
HONOURED: dict[str, tuple[Any, dict[str, Any]]] = {
    "model": ("m", {"model": "m"}),
    "messages": (
        [HELLO, {"role": "assistant", "content": "Hi"}, HELLO],
        {"messages": [HELLO, {"role": "assistant", "content": "Hi"}, HELLO]},
    ),
    "max_tokens": (7, {"max_tokens": 7}),
    "stop_sequences": (["END"], {"stop": ["END"]}),
    "stream": (True, {"stream": True}),
    "system": (
        [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        {"messages": [{"role": "system", "content": "Be brief."}, HELLO]},
    ),
    "temperature": (0.5, {"temperature": 0.5}),
    "top_k": (5, {"top_k": 5}),
    "top_p": (0.9, {"top_p": 0.9}),
    "thinking": (
        {"type": "enabled", "budget_tokens": 2000},
        {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}, "thinking_token_budget": 2000},
    ),
    "tools": (
        [TOOL],
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "weather", "description": "The weather", "parameters": TOOL["input_schema"]},
                }
            ]
        },
    ),
    "tool_choice": ({"type": "none"}, {"tool_choice": "none"}),
    "output_config": (
        {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "max"},
        {
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            "chat_template_kwargs": {"reasoning_effort": "high"},
        },
    ),
}
NO_EFFECT: dict[str, Any] = {
    "cache_control": {"type": "ephemeral"},
    "diagnostics": {"previous_message_id": None},
    "inference_geo": "eu",
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "speed": "fast",
    "user_profile_id": "p",
    "workspace_id": "w",
}
REFUSED: dict[str, Any] = {"container": "c"}


def fields(*kinds: Any) -> list[str]:
    return sorted({name for kind in kinds for name in get_type_hints(kind)})


def chat(**values: Any) -> ChatBody:
    given = {"model": "m", "messages": [HELLO], "max_tokens": 5, **values}
    return to_chat(MessagesBody.model_validate_json(json.dumps(given)))


def told(body: ChatBody) -> dict[str, Any]:
    return body.model_dump(exclude_none=True, exclude_unset=True, by_alias=True)


def refusal(values: dict[str, Any], kind: Any = MessagesBody) -> str:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(json.dumps({"model": "m", "messages": [HELLO], "max_tokens": 5, **values}))
    return make_body_error(caught.value).message


@pytest.mark.parametrize(
    "name",
    fields(message_create_params.MessageCreateParamsNonStreaming, message_create_params.MessageCreateParamsStreaming),
)
def test_every_field_of_the_client(name: str) -> None:
    if name in HONOURED:
        value, expected = HONOURED[name]
        found = told(chat(**{name: value}))
        assert {key: found.get(key) for key in expected} == expected
    elif name in NO_EFFECT:
        assert told(chat(**{name: NO_EFFECT[name]})) == told(chat())
    else:
        assert refusal({name: REFUSED[name]}).startswith(f"{name} is not supported: ")


@pytest.mark.parametrize("name", fields(message_count_tokens_params.MessageCountTokensParams))
def test_every_field_of_counting(name: str) -> None:
    value = HONOURED[name][0] if name in HONOURED else NO_EFFECT[name]
    CountTokensBody.model_validate({"model": "m", "messages": [HELLO], name: value})


def test_an_unknown_key_is_named() -> None:
    assert "'max_token'" in refusal({"max_token": 5})


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ],
)
def test_tool_choice(asked: dict[str, Any], expected: Any) -> None:
    body = told(chat(tools=[TOOL], tool_choice={**asked, "disable_parallel_tool_use": True}))
    assert (body["tool_choice"], body["parallel_tool_calls"]) == (expected, False)


def test_a_round_of_tools() -> None:
    body = chat(
        messages=[
            HELLO,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Look it up.", "signature": "s"},
                    {"type": "text", "text": "One moment."},
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                    {"type": "tool_result", "tool_use_id": "toolu_2", "content": "none", "is_error": True},
                    {"type": "text", "text": "And?"},
                ],
            },
        ]
    )
    assert [message.to_template() for message in body.messages[1:]] == [
        {
            "role": "assistant",
            "content": "One moment.",
            "reasoning_content": "Look it up.",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
            ],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "toolu_1", "name": "weather"},
        {"role": "tool", "content": "Error: none", "tool_call_id": "toolu_2"},
        {"role": "user", "content": "And?"},
    ]


def test_users_in_a_row_are_one() -> None:
    assert [message.to_template() for message in chat(messages=[HELLO, HELLO]).messages] == [
        {"role": "user", "content": "Hello\nHello"}
    ]


def test_the_answer_continues_a_last_assistant() -> None:
    body = chat(messages=[HELLO, {"role": "assistant", "content": "The"}])
    assert body.continue_final_message and not body.add_generation_prompt


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "text only: describe the image",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "new_block"}]}]}, "'new_block' is not supported"),
        (
            {
                "messages": [
                    HELLO,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {}}]},
                ]
            },
            "a user message with their tool_result",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {}}]}
                        ],
                    }
                ]
            },
            "text only: describe the image",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' are not supported"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "'other', which is not among the tools"),
        ({"tool_choice": {"type": "tool"}}, "if and only if its type is 'tool'"),
        ({"mcp_servers": [{"url": "https://x"}]}, "mcp_servers is not supported"),
        ({"messages": []}, "at least 1 item"),
        ({"max_tokens": -1}, "max_tokens=-1"),
    ],
)
def test_refusals_say_why(values: dict[str, Any], reason: str) -> None:
    assert reason in refusal(values)


def test_the_clients_tools_are_all_custom_or_refused() -> None:
    from anthropic.types import tool_union_param

    kinds = [
        hints["type"]
        for kind in get_args(tool_union_param.ToolUnionParam)
        if (hints := get_type_hints(kind)) and "input_schema" not in hints
    ]
    assert len(kinds) > 5
    for name in [name for kind in kinds for name in get_args(kind)]:
        assert f"{name!r} are not supported" in refusal({"tools": [{"type": name, "name": "x"}]})
