"""The official client against a running server."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.server.running import RunningServer


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


ASK: Any = [{"role": "user", "content": "What is the capital of France?"}]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=ASK, temperature=0, max_tokens=16)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens == 37 and answer.usage.completion_tokens == 8


def test_streamed_chat_says_the_same(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="smollm2", messages=ASK, temperature=0, max_tokens=16, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "The capital of France is Paris."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8 and not chunks[-1].choices
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 32


def test_choices_differ_by_seed_and_repeat(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="smollm2", messages=ASK, temperature=1.5, max_tokens=12, n=3, seed=seed
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = texts(1)
    assert len(set(first)) == 3
    assert texts(1) == first
    assert texts(2) != first


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=ASK, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 4
    assert [one.token for one in logprobs.content][:2] == ["The", " capital"]
    for one in logprobs.content:
        assert len(one.top_logprobs) == 3 and one.top_logprobs[0].token == one.token and one.logprob <= 0
        assert bytes(one.bytes or []).decode() == one.token


def test_logit_bias_and_stop(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="smollm2", messages=ASK, temperature=0, max_tokens=16, stop=[" Paris"])
    assert plain.choices[0].message.content == "The capital of France is"
    banned = client.chat.completions.create(
        model="smollm2", messages=ASK, temperature=0, max_tokens=8, logit_bias={"504": -100}
    )
    assert banned.choices[0].message.content != "The capital of France is Paris."


def test_completions_with_echo_and_token_ids(client: openai.OpenAI, server: RunningServer) -> None:
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": "Once upon a time"}).json()["tokens"]
    text = client.completions.create(model="smollm2", prompt="Once upon a time", max_tokens=6, temperature=0)
    ids = client.completions.create(model="smollm2", prompt=tokens, max_tokens=6, temperature=0)
    assert text.choices[0].text == ids.choices[0].text
    bare = client.completions.create(
        model="smollm2",
        prompt="Once upon a time",
        max_tokens=1,
        echo=True,
        temperature=0,
        extra_body={"add_special_tokens": False},
    )
    assert bare.usage is not None and bare.usage.prompt_tokens == 4
    echoed = client.completions.create(
        model="smollm2", prompt=["Once upon a time", "One two"], max_tokens=2, temperature=0, echo=True, logprobs=1
    )
    assert [choice.index for choice in echoed.choices] == [0, 1]
    assert echoed.choices[0].text.startswith("Once upon a time") and echoed.choices[1].text.startswith("One two")
    logprobs = echoed.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.tokens is not None
    assert logprobs.token_logprobs[0] is None and len(logprobs.tokens) == 6


def test_async_client_and_many_at_once(server: RunningServer) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(model="smollm2", messages=ASK, temperature=0, max_tokens=16)
                    for _ in range(8)
                )
            )
        return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(ask()) == ["The capital of France is Paris."] * 8


def test_models_and_errors(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=ASK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model="smollm2", messages=ASK, extra_body={"max_token": 1})
    assert unknown.value.code == "unknown_parameter" and unknown.value.param == "max_token"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": "word " * 200_000}])
    assert long.value.code == "context_length_exceeded"


class Person(BaseModel):
    name: str
    age: int


def test_structured_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="smollm2",
        temperature=0,
        max_tokens=60,
        response_format=Person,
        messages=[{"role": "user", "content": "Make up a person with a name and an age, as JSON."}],
    )
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.choices[0].finish_reason == "stop"


WEATHER: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def test_required_and_named_tools(client: openai.OpenAI) -> None:
    import json

    ask: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = client.chat.completions.create(
        model="smollm2",
        messages=ask,
        tools=WEATHER,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=64,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls and calls[0].type == "function" and calls[0].function.name == "get_weather"
    assert "city" in json.loads(calls[0].function.arguments)
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
    named = client.chat.completions.create(
        model="smollm2",
        messages=ask,
        tools=WEATHER,
        temperature=0,
        max_tokens=64,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )
    assert named.choices[0].message.tool_calls and named.choices[0].finish_reason == "stop"


def test_streamed_tool_call(client: openai.OpenAI) -> None:
    import json

    stream = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=WEATHER,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=64,
        stream=True,
    )
    deltas = [call for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert deltas[0].id and deltas[0].function is not None and deltas[0].function.name == "get_weather"
    arguments = [delta.function.arguments for delta in deltas if delta.function and delta.function.arguments]
    assert len(arguments) > 1 and "city" in json.loads("".join(arguments))
