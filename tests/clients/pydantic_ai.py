"""pydantic-ai: plain and typed answers, tools, streams, through OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url, model = sys.argv[1:3]
ASK = "What is the capital of France?"
PARIS = "The capital of France is Paris."
SETTINGS: Any = {"temperature": 0.0, "max_tokens": 80}
openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
chat = OpenAIChatModel(model, provider=openai)
models: list[Any] = [
    chat,
    OpenAIResponsesModel(model, provider=openai),
    AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key="none")),
]


class Capital(BaseModel):
    city: str


for one in models:
    answer = Agent(one, model_settings=SETTINGS).run_sync(ASK)
    assert answer.output == PARIS, (one, answer)
for form in (NativeOutput(Capital), ToolOutput(Capital)):
    typed: Any = Agent(chat, output_type=form, model_settings=SETTINGS).run_sync(ASK)
    assert isinstance(typed.output, Capital) and typed.output.city, typed


async def stream() -> str:
    async with Agent(chat, model_settings=SETTINGS).run_stream(ASK) as result:
        return "".join([part async for part in result.stream_text(delta=True)])


assert asyncio.run(stream()) == PARIS
