"""OpenAI's own package: chat, streams, tools, parsed answers, responses, completions, files and batches, errors."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import openai
from pydantic import BaseModel

url, model = sys.argv[1:3]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
QUESTION = "What is the capital of France?"
ASK: Any = [{"role": "user", "content": QUESTION}]
PARIS = "The capital of France is Paris."
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Capital(BaseModel):
    city: str


assert model in [one.id for one in client.models.list()]
assert client.models.retrieve(model).id == model

# chat
first = client.chat.completions.create(model=model, messages=ASK)
assert "Paris" in (first.choices[0].message.content or ""), first
answer = client.chat.completions.create(
    model=model,
    messages=ASK,
    temperature=0,
    max_completion_tokens=16,
    logprobs=True,
    top_logprobs=2,
    seed=1,
    store=False,
    metadata={"a": "b"},
    service_tier="auto",
    parallel_tool_calls=True,
    safety_identifier="x",
    prompt_cache_key="y",
    verbosity="low",
)
assert answer.choices[0].message.content == PARIS and answer.usage and answer.usage.completion_tokens == 8
assert answer.choices[0].logprobs and len(answer.choices[0].logprobs.content or []) == 8
named = client.chat.completions.create(model="gpt-4o-mini", messages=ASK, temperature=0, max_tokens=16)
assert named.choices[0].message.content == PARIS

chunks = list(
    client.chat.completions.create(
        model=model, messages=ASK, temperature=0, max_tokens=16, stream=True, stream_options={"include_usage": True}
    )
)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == PARIS
assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 8
with client.chat.completions.stream(model=model, messages=ASK, temperature=0, max_tokens=16) as stream:
    kinds = {event.type for event in stream}
    assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
    assert stream.get_final_completion().choices[0].message.content == PARIS

# structure and tools
parsed = client.chat.completions.parse(model=model, messages=ASK, response_format=Capital, temperature=0, max_tokens=60)
assert isinstance(parsed.choices[0].message.parsed, Capital), parsed
called = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Weather in Paris?"}],
    tools=[TOOL],
    tool_choice="required",
    temperature=0,
    max_tokens=80,
)
calls: Any = called.choices[0].message.tool_calls
assert calls and calls[0].function.name == "get_weather" and "city" in json.loads(calls[0].function.arguments), called
followed = client.chat.completions.create(
    model=model,
    temperature=0,
    max_tokens=16,
    tools=[TOOL],
    messages=[
        {"role": "user", "content": "Weather in Paris?"},
        called.choices[0].message.to_dict(),  # type: ignore[list-item]
        {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"},
    ],
)
assert followed.choices[0].message.content, followed

# responses
response = client.responses.create(model=model, input=QUESTION, temperature=0, max_output_tokens=16)
assert response.output_text == PARIS and response.status == "completed", response
again = client.responses.create(
    model=model, input="And its river?", previous_response_id=response.id, max_output_tokens=16
)
assert again.output_text and client.responses.retrieve(response.id).output_text == PARIS
with client.responses.stream(model=model, input=QUESTION, temperature=0, max_output_tokens=16) as events:
    types = [event.type for event in events]
assert types[0] == "response.created" and types[-1] == "response.completed", types
shaped = client.responses.parse(model=model, input=QUESTION, text_format=Capital, temperature=0, max_output_tokens=60)
assert isinstance(shaped.output_parsed, Capital), shaped
waiting = client.responses.create(model=model, input=QUESTION, temperature=0, max_output_tokens=16, background=True)
assert waiting.status in ("queued", "in_progress", "completed"), waiting
for _ in range(600):
    waiting = client.responses.retrieve(waiting.id)
    if waiting.status not in ("queued", "in_progress"):
        break
    time.sleep(0.1)
assert waiting.status == "completed" and waiting.output_text == PARIS, waiting

# completions
text = client.completions.create(model=model, prompt="Once upon a time", max_tokens=6, temperature=0, n=2, best_of=2)
assert len(text.choices) == 2 and text.choices[0].text
streamed = client.completions.create(model=model, prompt="Once upon a time", max_tokens=6, temperature=0, stream=True)
assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == text.choices[0].text

# files and batches
lines = [
    {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": model, "messages": ASK, "temperature": 0, "max_tokens": 16},
    }
    for number in range(3)
]
file = client.files.create(file=("lines.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
for _ in range(1200):
    batch = client.batches.retrieve(batch.id)
    if batch.status in ("completed", "failed", "expired", "cancelled"):
        break
    time.sleep(0.1)
assert batch.status == "completed" and batch.output_file_id, batch
made = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
assert sorted(one["custom_id"] for one in made) == ["line-0", "line-1", "line-2"]
assert {one["response"]["body"]["choices"][0]["message"]["content"] for one in made} == {PARIS}
assert batch.id in [one.id for one in client.batches.list()] and client.files.delete(file.id).deleted

# errors
for wrong, error in (
    ({"temperature": 9}, openai.BadRequestError),
    ({"max_token": 9}, openai.BadRequestError),
    ({"model": "no-such-model"}, openai.NotFoundError),
):
    body: Any = {"model": model, "messages": ASK, "extra_body": wrong}
    try:
        client.chat.completions.create(**body)
    except error:
        continue
    raise AssertionError(f"{wrong} was taken")
try:
    client.embeddings.create(model=model, input="a")
except openai.BadRequestError as refusal:
    assert "embedding" in str(refusal), refusal
else:
    raise AssertionError("a model that generates embedded a text")


async def ask_many() -> list[str | None]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as many:
        answers = await asyncio.gather(
            *(many.chat.completions.create(model=model, messages=ASK, temperature=0, max_tokens=16) for _ in range(8))
        )
    return [one.choices[0].message.content for one in answers]


assert asyncio.run(ask_many()) == [PARIS] * 8
