"""The body of /v1/responses: every field of OpenAI's, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from penstock.server.fields import MAX_MESSAGES, MAX_TOOLS, MOST_TOP_LOGPROBS, WHOLE, Body, StreamOptions
from penstock.server.responses.items import InputMessage, Item
from penstock.server.responses.tools import Function, ToolChoice, chat_tools

LOGPROBS = "message.output_text.logprobs"
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]  # OpenAI's own limits
REFUSED = {
    "context_management": "conversations are not compacted; leave it out, or cut them with truncation='auto'",
    "conversation": "the server keeps no conversations; use previous_response_id, or send the items",
    "moderation": "the server moderates nothing; leave it out",
    "personality": "say it in instructions",
    "prompt": "the server keeps no prompts; send instructions and input",
}


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # without effect: reasoning is told as it is
    context: str | None = None
    generate_summary: str | None = None
    mode: str | None = None
    summary: str | None = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("a format of type json_schema needs a schema")
        return self

    def chat(self) -> dict[str, Any]:
        if self.type == "json_schema":
            return {
                "type": self.type,
                "json_schema": {"name": self.name or "schema", "schema": self.schema_, "strict": self.strict},
            }
        return {"type": self.type}


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: str | None = None  # without effect


class InputBody(Body):
    """What makes the prompt."""

    DECISIVE: ClassVar[Mapping[str, str]] = {
        "max_tokens": "give max_output_tokens",
        "max_completion_tokens": "give max_output_tokens",
        "messages": "give input",
        "response_format": "give text.format",
        "stop": "use chat completions",
        "system": "give instructions",
    }
    model: str | None = None
    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    tool_choice: ToolChoice | None = None
    tools: list[Function] | None = Field(None, max_length=MAX_TOOLS)
    truncation: Literal["auto", "disabled"] | None = None
    # refused
    conversation: Any = None
    personality: Any = None

    @property
    def items(self) -> list[Item]:
        """The input's own items, without those of earlier responses."""
        if isinstance(self.input, str):
            return [InputMessage(role="user", content=self.input)]
        return self.input or []

    @model_validator(mode="after")
    def _possible(self) -> InputBody:
        for name, why in REFUSED.items():
            if getattr(self, name, None):
                raise ValueError(f"{name} is not supported: {why}")
        if not self.items and self.previous_response_id is None:
            raise ValueError("input is needed: a text, or a list of items")
        chat_tools(self.tools, self.tool_choice)
        return self


class InputTokensBody(InputBody):
    pass


class ResponsesBody(InputBody):
    background: bool | None = None
    include: list[str] | None = None  # all but logprobs are of what never comes here
    max_output_tokens: int | None = Field(None, ge=1, le=WHOLE)
    metadata: Metadata | None = None  # told again with the response
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    top_p: float | None = Field(None, gt=0, le=1)
    # without effect
    access_programs: Any = None
    image: Any = None
    max_tool_calls: int | None = None  # of tools that the server itself would run
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None
    # refused
    context_management: Any = None
    moderation: Any = None
    prompt: Any = None

    @model_validator(mode="after")
    def _kept(self) -> ResponsesBody:
        if self.background and self.store is False:
            raise ValueError("a response in the background is kept until it is fetched: leave store=false out")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())
