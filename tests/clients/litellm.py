"""litellm: chat, streaming, tools, structure, text completion."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

url, model = sys.argv[1:3]
ASK = [{"role": "user", "content": "What is the capital of France?"}]
SERVER: dict[str, Any] = {
    "model": f"openai/{model}",
    "api_base": f"{url}/v1",
    "api_key": "none",
    "temperature": 0,
    "num_retries": 0,
}

answer = litellm.completion(messages=ASK, max_tokens=16, **SERVER)
assert answer.choices[0].message.content == "The capital of France is Paris.", answer
assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == 8

chunks = list(
    litellm.completion(messages=ASK, max_tokens=16, stream=True, stream_options={"include_usage": True}, **SERVER)
)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The capital of France is Paris."
assert len(chunks) > 5

tool = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
called = litellm.completion(
    messages=[{"role": "user", "content": "How is the weather in Paris?"}],
    max_tokens=80,
    tools=[tool],
    tool_choice="required",
    **SERVER,
)
calls = called.choices[0].message.tool_calls
assert calls and calls[0].function.name == "get_weather" and "city" in json.loads(calls[0].function.arguments), called

formed = litellm.completion(
    messages=ASK,
    max_tokens=60,
    response_format={
        "type": "json_schema",
        "json_schema": {
            "name": "answer",
            "strict": True,
            "schema": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    **SERVER,
)
assert set(json.loads(formed.choices[0].message.content)) == {"city"}, formed

text = litellm.text_completion(
    prompt="Once upon a time", max_tokens=6, **{**SERVER, "model": f"text-completion-openai/{model}"}
)
assert text.choices[0].text, text

try:
    litellm.completion(messages=ASK, **{**SERVER, "model": "openai/no-such-model"})
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("a model that is not there was found")
