"""Anthropic's official client against a running server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from pydantic import BaseModel

from tests.server.running import RunningServer

ASK: Any = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
TOOL: Any = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
GREEDY = {"temperature": 0}


class City(BaseModel):
    name: str
    is_capital: bool


@pytest.fixture(scope="module")
def client(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def locked(tiny_model: Path) -> Iterator[RunningServer]:
    with RunningServer(
        str(tiny_model),
        "--load-format",
        "dummy",
        "--api-key",
        "secret",
        "--served-model-name",
        "tiny",
        "--max-body-mb",
        "1",
    ) as running:
        yield running


def test_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="smollm2", max_tokens=16, messages=ASK, extra_body=GREEDY)
    assert [part.model_dump(exclude_none=True) for part in message.content] == [{"type": "text", "text": PARIS}]
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", "smollm2")
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == 37 and usage.output_tokens == 8
    assert message._request_id is not None and message._request_id.startswith("req_")


def test_counted_tokens_are_those_of_the_prompt(client: anthropic.Anthropic) -> None:
    assert client.messages.count_tokens(model="smollm2", messages=ASK).input_tokens == 37
    longer = client.messages.count_tokens(model="smollm2", messages=ASK, system="Be brief.", tools=[TOOL])
    assert longer.input_tokens > 100
    endless = [{"role": "user", "content": "a b " * 100_000}]
    assert client.messages.count_tokens(model="smollm2", messages=endless).input_tokens > 100_000  # type: ignore


def test_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="smollm2", max_tokens=16, messages=ASK, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == PARIS
        message = stream.get_final_message()
    assert message.stop_reason == "end_turn" and message.usage.output_tokens == 8
    raw = client.messages.create(model="smollm2", max_tokens=4, messages=ASK, stream=True, extra_body=GREEDY)
    kinds = [event.type for event in raw]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_async_stream(server: RunningServer) -> None:
    async def main() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:

            async def one() -> str:
                async with client.messages.stream(
                    model="smollm2", max_tokens=16, messages=ASK, extra_body=GREEDY
                ) as stream:
                    return "".join([text async for text in stream.text_stream])

            return await asyncio.gather(*(one() for _ in range(4)))

    assert asyncio.run(main()) == [PARIS] * 4


def test_stop_sequence(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model="smollm2", max_tokens=16, messages=ASK, stop_sequences=[" Paris", "x"], extra_body=GREEDY
    )
    assert message.content[0].text == "The capital of France is"  # type: ignore[union-attr]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " Paris")


def test_the_answer_continues_the_last_message(client: anthropic.Anthropic) -> None:
    begun: Any = [*ASK, {"role": "assistant", "content": "The capital of France"}]
    message = client.messages.create(model="smollm2", max_tokens=8, messages=begun, extra_body=GREEDY)
    assert message.content[0].text == " is Paris."  # type: ignore[union-attr]


def test_max_tokens_beyond_the_longest_sequence(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model="smollm2", max_tokens=32_000, messages=ASK, stop_sequences=["."], extra_body=GREEDY
    ) as stream:
        assert stream.get_final_message().stop_reason == "stop_sequence"


def test_a_round_of_tools(client: anthropic.Anthropic) -> None:
    ask: Any = [{"role": "user", "content": "What is the weather in Bern?"}]
    message = client.messages.create(
        model="smollm2",
        max_tokens=32,
        messages=ask,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "weather"},
        extra_body=GREEDY,
    )
    call = message.content[0]
    assert message.stop_reason == "tool_use" and call.type == "tool_use"
    assert call.name == "weather" and call.input["city"] in ("Bern", "Paris")
    with client.messages.stream(
        model="smollm2",
        max_tokens=32,
        messages=ask,
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body=GREEDY,
    ) as stream:
        streamed = stream.get_final_message()
    assert [part.type for part in streamed.content] == ["tool_use"]
    assert streamed.content[0].input == call.input  # type: ignore[union-attr]
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]}
    answer = client.messages.create(
        model="smollm2", max_tokens=8, messages=[*ask, message.to_param(), result], tools=[TOOL]
    )
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > (
        message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    )


def test_parsed_output(client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(model="smollm2", max_tokens=32, messages=ASK, output_format=City).parsed_output
    assert isinstance(parsed, City)
    with client.messages.stream(model="smollm2", max_tokens=32, messages=ASK, output_format=City) as stream:
        assert isinstance(stream.get_final_message().parsed_output, City)


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'nothing' does not exist"):
        client.messages.create(model="nothing", max_tokens=1, messages=ASK)
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="smollm2", max_tokens=1, messages=ASK, extra_body={"tempersture": 1})
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"] == {
        "type": "invalid_request_error",
        "message": "unknown parameter: 'tempersture': did you mean 'temperature'?",
    }
    assert body["request_id"] == caught.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="the prompt has"):
        client.messages.create(model="smollm2", max_tokens=1, messages=[{"role": "user", "content": "a " * 4000}])


def test_refusals_before_the_route_have_the_shape_too(locked: RunningServer) -> None:
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        anthropic.Anthropic(base_url=locked.url, api_key="wrong", max_retries=0).messages.create(
            model="tiny", max_tokens=1, messages=ASK
        )
    key = {"x-api-key": "secret"}
    large = httpx.post(f"{locked.url}/v1/messages", content=b"x" * 2_000_000, headers=key)
    wrong = httpx.get(f"{locked.url}/v1/messages", headers=key)
    missing = httpx.post(f"{locked.url}/v1/messages/batches", headers=key)
    for answer, status, kind in (
        (large, 413, "request_too_large"),
        (wrong, 405, "invalid_request_error"),
        (missing, 404, "not_found_error"),
    ):
        assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (status, "error", kind)
    assert "error" in httpx.post(f"{locked.url}/v1/chat/completions").json()
    good = anthropic.Anthropic(base_url=locked.url, api_key="secret", max_retries=0)
    assert good.messages.create(model="tiny", max_tokens=2, messages=ASK).usage.output_tokens <= 2
