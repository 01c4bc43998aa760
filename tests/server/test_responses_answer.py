"""Answers as OpenAI's responses, as its own client reads them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.server.http.errors import ApiError
from penstock.server.responses.answer import ResponseAnswer
from penstock.server.responses.body import ResponsesBody
from tests.server.recorded import THOUGHT_AND_CALLS, Recorded, chat_prompt, joined

EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def answer(
    text: str,
    values: dict[str, Any] | None = None,
    kept: list[Any] | None = None,
    max_calls: int | None = None,
    **more: Any,
) -> ResponseAnswer:
    body = ResponsesBody.model_validate({"input": "Hi", "model": "m", **(values or {})})
    return ResponseAnswer(
        body, chat_prompt(max_calls), Recorded(text, **more), (kept if kept is not None else []).append
    )


def events(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: ")]


def streamed(body: bytes) -> tuple[Response, list[str]]:
    """The response and the events that the client makes of a stream."""
    transport = httpx2.MockTransport(
        lambda request: httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=body)
    )
    client = openai.OpenAI(
        base_url="http://local", api_key="k", max_retries=0, http_client=httpx2.Client(transport=transport)
    )
    with client.responses.stream(model="m", input="Hi") as stream:
        kinds: list[str] = [event.type for event in stream]
        return stream.get_final_response(), kinds


def told(output: list[Any]) -> list[tuple[str, Any]]:
    items = [item if isinstance(item, dict) else item.model_dump() for item in output]
    return [
        (item["type"], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in items
    ]


EXPECTED = [
    ("reasoning", "Look it up.\n"),
    ("message", "One moment.\n"),
    ("function_call", '{"city": "Bern"}'),
    ("function_call", '{"city": "Genf"}'),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_text_and_calls(size: int) -> None:
    whole = asyncio.run(answer(THOUGHT_AND_CALLS, size=size).collect())
    Response.model_validate(whole)
    assert told(whole["output"]) == EXPECTED
    assert whole["status"] == "completed" and {item["status"] for item in whole["output"]} == {"completed"}
    response, kinds = streamed(asyncio.run(joined(answer(THOUGHT_AND_CALLS, size=size).events())))
    assert told(response.output) == EXPECTED
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    assert "response.reasoning_text.delta" in kinds and "response.function_call_arguments.done" in kinds


def test_events_are_numbered_and_well_formed() -> None:
    sent = events(asyncio.run(joined(answer(THOUGHT_AND_CALLS).events())))
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    for event in sent:
        EVENTS.validate_python(event)
    ids = {event["item"]["id"] for event in sent if event["type"] == "response.output_item.added"}
    assert ids == {item["id"] for item in sent[-1]["response"]["output"]} and len(ids) == 4


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    cut = THOUGHT_AND_CALLS[: THOUGHT_AND_CALLS.index("ern")]
    whole = asyncio.run(answer(cut, finish_reason="length").collect())
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in whole["output"]] == ["completed", "completed", "incomplete"]
    sent = events(asyncio.run(joined(answer(cut, finish_reason="length").events())))
    done = [event["item"]["status"] for event in sent if event["type"] == "response.output_item.done"]
    assert done == ["completed", "completed", "incomplete"]
    assert sent[-1]["type"] == "response.incomplete"


def test_an_empty_answer_is_an_empty_message() -> None:
    assert told(asyncio.run(answer("").collect())["output"]) == [("message", "")]
    response, _ = streamed(asyncio.run(joined(answer("").events())))
    assert told(response.output) == [("message", "")]


def test_one_call_where_only_one_is_wanted() -> None:
    whole = asyncio.run(answer(THOUGHT_AND_CALLS, max_calls=1).collect())
    assert told(whole["output"]) == EXPECTED[:3]


def test_a_response_is_kept_unless_it_is_not_to_be() -> None:
    kept: list[Any] = []
    asyncio.run(answer("Hi", {"store": False}, kept).collect())
    assert not kept
    sent = events(asyncio.run(joined(answer("Hi", kept=kept).events())))
    assert kept == [sent[-1]["response"]]


def test_what_was_asked_is_told_again() -> None:
    schema = {"type": "object"}
    asked = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "max_output_tokens": 5,
        "user": "u",
        "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
        "tools": [{"type": "function", "name": "f", "parameters": schema, "strict": True}],
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "low"},
    }
    whole = asyncio.run(answer("Hi", asked).collect())
    response = Response.model_validate(whole)
    assert response.text is not None and response.text.format is not None
    assert response.text.format.to_dict() == asked["text"]["format"]  # type: ignore[index]
    assert {name: whole[name] for name in ("instructions", "metadata", "max_output_tokens", "user", "tool_choice")} == {
        name: asked[name] for name in ("instructions", "metadata", "max_output_tokens", "user", "tool_choice")
    }
    assert whole["tools"][0]["name"] == "f" and whole["reasoning"]["effort"] == "low"


def test_a_failure_in_a_stream_is_told() -> None:
    async def broken() -> bytes:
        broken = answer("Hi there", error=ApiError(503, "it broke"))
        sent = b""
        try:
            async for event in broken.events():
                sent += event
        except ApiError as error:
            sent += broken.encode_failure(error)
        return sent

    sent = events(asyncio.run(broken()))
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    error, failed = sent[-2:]
    assert (error["type"], error["message"]) == ("error", "it broke")
    assert failed["type"] == "response.failed" and failed["response"]["error"]["message"] == "it broke"
    assert told(failed["response"]["output"]) == [("message", "Hi there")]
    for event in (error, failed):
        EVENTS.validate_python(event)
