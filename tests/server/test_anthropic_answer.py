"""Answers in Anthropic's shapes, as its own client reads them."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import httpx2
import pytest

from penstock.server.anthropic.body import MessagesBody
from penstock.server.anthropic.errors import format_failure
from penstock.server.anthropic.routes import MessageAnswer
from penstock.server.http import sse
from penstock.server.http.errors import ApiError
from tests.server.recorded import THOUGHT_AND_CALLS, Recorded, chat_prompt, joined


def answer(
    text: str,
    values: dict[str, Any] | None = None,
    fills_context: bool = False,
    max_calls: int | None = None,
    **more: Any,
) -> MessageAnswer:
    given = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}], **(values or {})}
    return MessageAnswer(
        MessagesBody.model_validate(given), chat_prompt(max_calls), Recorded(text, **more), fills_context=fills_context
    )


def streamed(body: bytes) -> tuple[anthropic.types.Message, list[str]]:
    """The message and the events that the client makes of a stream."""
    transport = httpx2.MockTransport(
        lambda request: httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=body)
    )
    client = anthropic.Anthropic(
        base_url="http://local", api_key="k", max_retries=0, http_client=httpx2.Client(transport=transport)
    )
    with client.messages.stream(model="m", max_tokens=50, messages=[{"role": "user", "content": "Hi"}]) as stream:
        kinds: list[str] = [event.type for event in stream]
        return stream.get_final_message(), kinds


def plain(content: list[Any]) -> list[dict[str, Any]]:
    return [part if isinstance(part, dict) else part.model_dump(exclude_none=True) for part in content]


def without_ids(content: list[Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in part.items() if key != "id" and value is not None} for part in plain(content)]


EXPECTED = [
    {"type": "thinking", "thinking": "Look it up.\n", "signature": ""},
    {"type": "text", "text": "One moment.\n"},
    {"type": "tool_use", "name": "weather", "input": {"city": "Bern"}},
    {"type": "tool_use", "name": "weather", "input": {"city": "Genf"}},
]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_thinking_text_and_calls(size: int) -> None:
    whole = asyncio.run(answer(THOUGHT_AND_CALLS, size=size).collect())
    assert without_ids(whole["content"]) == EXPECTED
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    message, kinds = streamed(asyncio.run(joined(answer(THOUGHT_AND_CALLS, size=size).events())))
    assert without_ids(message.content) == EXPECTED
    assert message.stop_reason == "tool_use"
    ids = [part.id for part in message.content if part.type == "tool_use"]
    assert len(set(ids)) == 2 and all(id.startswith("toolu_") for id in ids)
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


def test_usage_tells_what_was_cached_and_thought() -> None:
    usage = asyncio.run(answer("<think>ab</think>cd", size=1).collect())["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (6, 4, 19)
    assert 2 <= usage["output_tokens_details"]["thinking_tokens"] <= 17
    message, _ = streamed(asyncio.run(joined(answer("abc", size=1).events())))
    assert (message.usage.input_tokens, message.usage.output_tokens) == (6, 3)


@pytest.mark.parametrize(
    ("values", "more", "expected"),
    [
        ({}, {"finish_reason": "stop"}, ("end_turn", None)),
        ({}, {"finish_reason": "length"}, ("max_tokens", None)),
        ({}, {"finish_reason": "length", "fills_context": True}, ("model_context_window_exceeded", None)),
        ({}, {"finish_reason": "stop", "stop_reason": "END"}, ("stop_sequence", "END")),
    ],
)
def test_stop_reasons(values: dict[str, Any], more: dict[str, Any], expected: tuple[str, str | None]) -> None:
    whole = asyncio.run(answer("Hi", values, **more).collect())
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    message, _ = streamed(asyncio.run(joined(answer("Hi", values, **more).events())))
    assert (message.stop_reason, message.stop_sequence) == expected


def test_one_call_where_only_one_is_wanted() -> None:
    assert without_ids(asyncio.run(answer(THOUGHT_AND_CALLS, max_calls=1).collect())["content"]) == EXPECTED[:3]


def test_thinking_can_be_left_out() -> None:
    omitted = {"thinking": {"type": "adaptive", "display": "omitted"}}
    assert asyncio.run(answer(THOUGHT_AND_CALLS, omitted).collect())["content"][0]["thinking"] == ""
    message, _ = streamed(asyncio.run(joined(answer(THOUGHT_AND_CALLS, omitted).events())))
    assert plain(message.content)[0] == {"type": "thinking", "thinking": "", "signature": ""}


def test_arguments_that_were_cut_off() -> None:
    cut = THOUGHT_AND_CALLS[: THOUGHT_AND_CALLS.index("ern")]
    content = asyncio.run(answer(cut, finish_reason="length").collect())["content"]
    assert content[-1]["input"] == {"city": "B"}


def test_nothing_is_said_with_max_tokens_0() -> None:
    whole = asyncio.run(answer("x", {"max_tokens": 0}, finish_reason="length").collect())
    assert (whole["content"], whole["usage"]["output_tokens"], whole["stop_reason"]) == ([], 0, "max_tokens")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(429, "rate_limit_error"), (503, "overloaded_error"), (408, "timeout_error"), (500, "api_error")],
)
def test_a_failure_in_a_stream_is_an_error_of_the_client(status: int, kind: str) -> None:
    begun = asyncio.run(joined(answer("Hi").events())).split(b"event: content_block_stop")[0]
    told = format_failure(ApiError(status, "it broke"), "req_1")
    with pytest.raises(anthropic.APIStatusError) as caught:
        streamed(begun + sse.named_event("error", told))
    assert caught.value.body == {"type": "error", "error": {"type": kind, "message": "it broke"}, "request_id": "req_1"}
