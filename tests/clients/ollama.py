"""Ollama's own package: chat, streaming, generate, structure, embeddings' refusal, the list of models."""

from __future__ import annotations

import json
import sys

import ollama

url, model = sys.argv[1:3]
client = ollama.Client(host=url)
ASK = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "num_predict": 16}

assert model in {str(one.model).removesuffix(":latest") for one in client.list().models}
answer = client.chat(model, messages=ASK, options=GREEDY)
assert answer.message.content == "The capital of France is Paris.", answer
assert answer.done and answer.done_reason == "stop" and answer.eval_count

parts = list(client.chat(model, messages=ASK, options=GREEDY, stream=True))
assert "".join(part.message.content or "" for part in parts) == answer.message.content
assert parts[-1].done and len(parts) > 3

text = client.generate(model, "What is the capital of France?", options=GREEDY)
assert text.response and text.done
assert (
    "".join(
        part.response for part in client.generate(model, "What is the capital of France?", options=GREEDY, stream=True)
    )
    == text.response
)

schema = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
formed = client.chat(model, messages=ASK, options={"temperature": 0, "num_predict": 48}, format=schema)
assert set(json.loads(formed.message.content or "")) == {"city"}, formed

try:
    client.chat("no-such-model", messages=ASK)
except ollama.ResponseError as error:
    assert error.status_code == 404 and error.error, error
else:
    raise AssertionError("a model that is not there was found")
