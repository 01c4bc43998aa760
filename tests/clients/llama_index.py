"""llama-index: completion, chat, streams, tools and structured answers through its OpenAI-like model."""

from __future__ import annotations

import sys
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

url, model = sys.argv[1:3]
ASK = "What is the capital of France?"
PARIS = "The capital of France is Paris."
llm: Any = OpenAILike(
    model=model,
    api_base=f"{url}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    temperature=0,
    max_tokens=80,
    context_window=2048,
    max_retries=0,
)


class Capital(BaseModel):
    """The capital of a country."""

    city: str


def get_weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"sun in {city}"


assert llm.complete(ASK).text == PARIS
assert llm.chat([ChatMessage(role="user", content=ASK)]).message.content == PARIS
assert "".join(part.delta or "" for part in llm.stream_complete(ASK)) == PARIS
assert "".join(part.delta or "" for part in llm.stream_chat([ChatMessage(role="user", content=ASK)])) == PARIS
called = llm.chat_with_tools(
    [FunctionTool.from_defaults(get_weather)], user_msg="Weather in Paris?", tool_required=True
)
calls = llm.get_tool_calls_from_response(called)
assert calls and calls[0].tool_name == "get_weather" and "city" in calls[0].tool_kwargs, called
found = llm.structured_predict(Capital, PromptTemplate(ASK))
assert isinstance(found, Capital) and found.city, found
