"""OpenAI's official client and /v1/responses of a running server."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.server.running import RunningServer

ASK = "What is the capital of France?"
PARIS = "The capital of France is Paris."
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class City(BaseModel):
    name: str
    is_capital: bool


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_response(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="smollm2", input=ASK, temperature=0, max_output_tokens=16, metadata={"a": "b"}
    )
    assert response.output_text == PARIS
    assert (response.status, response.metadata, response.model) == ("completed", {"a": "b"}, "smollm2")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (37, 8)


def test_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="smollm2", input=ASK, temperature=0, max_output_tokens=16) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        response = stream.get_final_response()
    assert text == response.output_text == PARIS
    raw = list(client.responses.create(model="smollm2", input=ASK, temperature=0, max_output_tokens=4, stream=True))
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    assert raw[-1].type == "response.incomplete"
    assert raw[-1].response.incomplete_details.reason == "max_output_tokens"  # type: ignore[union-attr]


def test_async_stream(server: RunningServer) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one() -> str:
                async with client.responses.stream(
                    model="smollm2", input=ASK, temperature=0, max_output_tokens=16
                ) as stream:
                    return (await stream.get_final_response()).output_text

            return await asyncio.gather(*(one() for _ in range(4)))

    assert asyncio.run(main()) == [PARIS] * 4


def test_a_response_follows_another(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model="smollm2", input=ASK, temperature=0, max_output_tokens=16, instructions="Be brief."
    )
    second = client.responses.create(
        model="smollm2", input="And of Italy?", previous_response_id=first.id, temperature=0, max_output_tokens=16
    )
    spoken: Any = [{"role": "user", "content": ASK}, *first.output, {"role": "user", "content": "And of Italy?"}]
    by_hand = client.responses.create(model="smollm2", input=spoken, temperature=0, max_output_tokens=16)
    assert second.output_text == by_hand.output_text != ""
    assert second.usage is not None and by_hand.usage is not None
    assert second.usage.input_tokens == by_hand.usage.input_tokens
    count = client.responses.input_tokens.count(model="smollm2", input="And of Italy?", previous_response_id=first.id)
    assert count.input_tokens == second.usage.input_tokens
    items: Any = client.responses.input_items.list(second.id, order="asc", limit=2)
    texts = [item.content[0].text for item in items]
    assert texts == [ASK, first.output_text, "And of Italy?"]


def test_responses_are_kept_and_forgotten(client: openai.OpenAI) -> None:
    made = client.responses.create(model="smollm2", input=ASK, max_output_tokens=2)
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    client.responses.delete(made.id)
    loose = client.responses.create(model="smollm2", input=ASK, max_output_tokens=2, store=False)
    for id in (made.id, loose.id, "resp_none"):
        with pytest.raises(openai.NotFoundError, match="not stored"):
            client.responses.retrieve(id)
        with pytest.raises(openai.NotFoundError, match="not stored"):
            client.responses.create(model="smollm2", input=ASK, previous_response_id=id)


def test_tenants_do_not_see_each_others_responses(keeping: RunningServer) -> None:
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    url = f"{keeping.url}/v1/responses"
    made = httpx.post(url, json={"input": "Hello", "max_output_tokens": 2}, headers=one).json()
    assert httpx.get(f"{url}/{made['id']}", headers=two).status_code == 404
    assert httpx.delete(f"{url}/{made['id']}", headers=two).status_code == 404
    assert httpx.get(f"{url}/{made['id']}").status_code == 401
    assert httpx.get(f"{url}/{made['id']}", headers=one).json() == made


def test_parse(client: openai.OpenAI) -> None:
    response = client.responses.parse(model="smollm2", input=ASK, text_format=City, max_output_tokens=32)
    assert isinstance(response.output_parsed, City)
    with client.responses.stream(model="smollm2", input=ASK, text_format=City, max_output_tokens=32) as stream:
        assert isinstance(stream.get_final_response().output_parsed, City)


def test_a_round_of_tools(client: openai.OpenAI) -> None:
    ask: Any = {"role": "user", "content": "What is the weather in Bern?"}
    response = client.responses.create(
        model="smollm2",
        input=[ask],
        tools=[TOOL],
        max_output_tokens=32,
        tool_choice={"type": "function", "name": "weather"},
        temperature=0,
    )
    call = response.output[0]
    assert call.type == "function_call" and call.name == "weather"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    kept = client.responses.create(
        model="smollm2",
        input=[result],
        previous_response_id=response.id,
        tools=[TOOL],
        max_output_tokens=8,
        temperature=0,
    )
    sent: Any = [ask, *response.output, result]
    by_hand = client.responses.create(model="smollm2", input=sent, tools=[TOOL], max_output_tokens=8, temperature=0)
    assert kept.usage is not None and by_hand.usage is not None
    assert kept.usage.input_tokens == by_hand.usage.input_tokens
    with client.responses.stream(
        model="smollm2",
        input=[ask],
        tools=[TOOL],
        max_output_tokens=32,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    ) as stream:
        streamed = stream.get_final_response()
    assert [item.type for item in streamed.output] == ["function_call"]
    assert streamed.output[0].parsed_arguments["city"] in ("Bern", "Paris")  # type: ignore[union-attr, index]


def test_logprobs(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="smollm2",
        input=ASK,
        temperature=0,
        max_output_tokens=4,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
    )
    message: Any = response.output[0]
    logprobs = message.content[0].logprobs
    assert [one.token for one in logprobs] == ["The", " capital", " of", " France"]
    assert all(len(one.top_logprobs) == 2 for one in logprobs)


def test_the_oldest_turns_are_cut_where_that_is_allowed(client: openai.OpenAI) -> None:
    spoken: Any = [{"role": "system", "content": "Be brief."}]
    for number in range(30):
        spoken += [{"role": "user", "content": f"{number} " + "word " * 100}, {"role": "assistant", "content": "Yes."}]
    spoken.append({"role": "user", "content": ASK})
    with pytest.raises(openai.BadRequestError, match="the prompt has"):
        client.responses.create(model="smollm2", input=spoken, max_output_tokens=8)
    response = client.responses.create(model="smollm2", input=spoken, max_output_tokens=8, truncation="auto")
    assert response.usage is not None and 2048 - 150 < response.usage.input_tokens <= 2040


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="unknown parameter: 'tempersture'"):
        client.responses.create(model="smollm2", input=ASK, extra_body={"tempersture": 1})
    with pytest.raises(openai.BadRequestError, match="conversation is not supported"):
        client.responses.create(model="smollm2", input=ASK, conversation="conv_1")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.responses.create(model="nothing", input=ASK)
