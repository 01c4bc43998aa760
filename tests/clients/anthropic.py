"""Anthropic's own package: messages, streams, tools, counting tokens, errors."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import anthropic

url, model = sys.argv[1:3]
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
ASK: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: Any = {"temperature": 0}  # the package has given up the argument; older ones, and servers, have not
PARIS = "The capital of France is Paris."
TOOL: Any = {
    "name": "get_weather",
    "description": "Tells the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


answer = client.messages.create(model=model, messages=ASK, max_tokens=16, extra_body=GREEDY)
assert text_of(answer) == PARIS and answer.stop_reason == "end_turn" and answer.usage.output_tokens == 8, answer
cached: Any = [{"type": "text", "text": "You answer in short sentences.", "cache_control": {"type": "ephemeral"}}]
assert text_of(
    client.messages.create(
        model=model,
        messages=ASK,
        system=cached,
        max_tokens=16,
        extra_body=GREEDY,
        metadata={"user_id": "x"},
        stop_sequences=["###"],
    )
)

with client.messages.stream(model=model, messages=ASK, max_tokens=16, extra_body=GREEDY) as stream:
    assert "".join(stream.text_stream) == PARIS
    assert text_of(stream.get_final_message()) == PARIS

called = client.messages.create(
    model=model,
    messages=[{"role": "user", "content": "Weather in Paris?"}],
    max_tokens=80,
    extra_body=GREEDY,
    tools=[TOOL],
    tool_choice={"type": "tool", "name": "get_weather"},
)
use: Any = next(block for block in called.content if block.type == "tool_use")
assert called.stop_reason == "tool_use" and "city" in use.input, called
followed = client.messages.create(
    model=model,
    max_tokens=16,
    extra_body=GREEDY,
    tools=[TOOL],
    messages=[
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": [block.model_dump() for block in called.content]},  # type: ignore
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]},
    ],
)
assert followed.content, followed

assert client.messages.count_tokens(model=model, messages=ASK).input_tokens > 8
assert any(one.id == model for one in client.models.list())

for wrong, error in (
    ({"extra_body": {"temperature": 9.0}}, anthropic.BadRequestError),
    ({"model": "no-such-model"}, anthropic.NotFoundError),
):
    body: Any = {"model": model, "messages": ASK, "max_tokens": 4, **wrong}
    try:
        client.messages.create(**body)
    except error:
        continue
    raise AssertionError(f"{wrong} was taken")


async def ask_many() -> list[str]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as many:
        answers = await asyncio.gather(
            *(many.messages.create(model=model, messages=ASK, max_tokens=16, extra_body=GREEDY) for _ in range(4))
        )
    return [text_of(one) for one in answers]


assert asyncio.run(ask_many()) == [PARIS] * 4
