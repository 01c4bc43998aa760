"""huggingface_hub's InferenceClient: chat in OpenAI's shape, text generation in TGI's, structure, tools, streams."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from huggingface_hub import AsyncInferenceClient, InferenceClient

url, model = sys.argv[1:3]
ASK: Any = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tells the weather of a city.", "parameters": SCHEMA},
}
GRAMMAR: Any = {"type": "json", "value": SCHEMA}

chat = InferenceClient(base_url=f"{url}/v1")
for named in (None, "tgi", model):
    answer = chat.chat_completion(ASK, model=named, max_tokens=16, temperature=0)
    assert answer.choices[0].message.content == PARIS, answer
chunks = list(chat.chat_completion(ASK, max_tokens=16, temperature=0, stream=True))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == PARIS
assert chat.chat.completions.create(messages=ASK, model=model, max_tokens=16, temperature=0).choices[0].message.content

formats: list[Any] = [
    {"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA, "strict": True}},
    {"type": "json", "value": SCHEMA},
    {"type": "json_object", "value": SCHEMA},
]
for form in formats:
    formed = chat.chat_completion(ASK, max_tokens=60, temperature=0, response_format=form)
    assert set(json.loads(formed.choices[0].message.content or "")) == {"city"}, (form, formed)
called = chat.chat_completion(
    [{"role": "user", "content": "Weather in Paris?"}],
    tools=[TOOL],
    tool_choice="required",
    max_tokens=80,
    temperature=0,
)
calls: Any = called.choices[0].message.tool_calls
assert calls and calls[0].function.name == "get_weather", called

text = InferenceClient(model=url)
plain = text.text_generation("Once upon a time", max_new_tokens=8)
assert plain, plain
parts = list(text.text_generation("Once upon a time", max_new_tokens=8, stream=True))
assert "".join(parts) == plain, (parts, plain)
detailed: Any = text.text_generation("Once upon a time", max_new_tokens=8, details=True, decoder_input_details=True)
assert detailed.details.generated_tokens == 8 and detailed.details.prefill, detailed
bound = text.text_generation("Answer in JSON.", max_new_tokens=40, grammar=GRAMMAR)
assert set(json.loads(bound)) == {"city"}, bound


async def ask_many() -> list[str | None]:
    client = AsyncInferenceClient(base_url=f"{url}/v1")
    answers = await asyncio.gather(*(client.chat_completion(ASK, max_tokens=16, temperature=0) for _ in range(4)))
    return [one.choices[0].message.content for one in answers]


assert asyncio.run(ask_many()) == [PARIS] * 4
