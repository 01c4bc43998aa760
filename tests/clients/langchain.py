"""langchain-openai: chat, streaming, batches, tools, structure."""

from __future__ import annotations

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

url, model = sys.argv[1:3]
ASK = "What is the capital of France?"
chat = ChatOpenAI(
    model=model, base_url=f"{url}/v1", api_key=SecretStr("none"), temperature=0, max_retries=0, max_completion_tokens=80
)

answer = chat.invoke(ASK)
assert answer.content == "The capital of France is Paris.", answer
assert answer.usage_metadata and answer.usage_metadata["output_tokens"] == 8

chunks = list(chat.stream(ASK))
assert "".join(str(chunk.content) for chunk in chunks) == answer.content and len(chunks) > 5

assert [one.content for one in chat.batch([ASK] * 3)] == [answer.content] * 3


def get_weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"sun in {city}"


called = chat.bind_tools([tool(get_weather)], tool_choice="required").invoke("How is the weather in Paris?")
assert called.tool_calls and called.tool_calls[0]["name"] == "get_weather" and "city" in called.tool_calls[0]["args"]


class Capital(BaseModel):
    city: str


for method in ("json_schema", "function_calling"):
    found = chat.with_structured_output(Capital, method=method).invoke(ASK)
    assert isinstance(found, Capital) and found.city, (method, found)
