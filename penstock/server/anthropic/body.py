"""The bodies of /v1/messages and /v1/messages/count_tokens: every field of Anthropic's, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from penstock.errors import shown
from penstock.server.anthropic.content import AssistantMessage, Message, Text, ToolUseBlock
from penstock.server.fields import MAX_MESSAGES, MAX_TOOLS, MOST_STOPS, WHOLE, Body, StopString

REFUSED = {
    "compaction": "send the shorter conversation",
    "container": "the server runs no containers; leave it out",
    "fallbacks": "the model that is named answers; leave it out",
    "mcp_servers": "the server calls no others; call them from the client and give their tools as custom tools",
    "thread": "the server keeps no messages; send the whole conversation",
}


class Tool(Body):
    name: str = Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.\-]+$")
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    # without effect: every tool is in the prompt, and the model calls it directly
    allowed_callers: list[str] | None = None
    cache_control: Any = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: Any = None

    @model_validator(mode="before")
    @classmethod
    def _custom(cls, tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "custom"):
            raise ValueError(
                f"tools of type {shown(kind)} are not supported: give custom tools, with a name and an input_schema"
            )
        return tool


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("tool_choice has a name if its type is 'tool', and only then")
        return self


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=0, le=WHOLE)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class PromptBody(Body):
    """What makes the prompt."""

    DECISIVE: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "give max_tokens",
        "max_output_tokens": "give max_tokens",
        "response_format": "give output_config.format",
        "stop": "give stop_sequences",
    }
    model: str
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[Text] | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older place of output_config.format
    # without effect
    cache_control: Any = None
    context_management: Any = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    # refused
    compaction: Any = None
    mcp_servers: Any = None

    @property
    def format(self) -> OutputFormat | None:
        return (self.output_config.format if self.output_config else None) or self.output_format

    @property
    def is_prefill(self) -> bool:
        """Whether the answer continues the last message."""
        return isinstance(self.messages[-1], AssistantMessage)

    @model_validator(mode="after")
    def _possible(self) -> PromptBody:
        for name, why in REFUSED.items():
            if getattr(self, name, None):
                raise ValueError(f"{name} is not supported: {why}")
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise ValueError("output_format and output_config.format mean the same: give output_config.format")
        names = [tool.name for tool in self.tools or ()]
        if self.tool_choice is not None and self.tool_choice.name is not None and self.tool_choice.name not in names:
            raise ValueError(f"tool_choice names {shown(self.tool_choice.name)}, which is not among the tools")
        last = self.messages[-1]
        if isinstance(last, AssistantMessage) and any(isinstance(part, ToolUseBlock) for part in last.content):
            raise ValueError("the last message calls tools: put a user message with their tool_result after it")
        return self


class CountTokensBody(PromptBody):
    pass


class MessagesBody(PromptBody):
    max_tokens: int = Field(ge=0, le=WHOLE)  # 0 computes the prompt, so that it is in the cache
    stop_sequences: list[StopString] | None = Field(None, max_length=MOST_STOPS)
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=WHOLE)
    # without effect
    diagnostics: Any = None
    fallback_credit_token: Any = None
    inference_geo: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # refused
    container: Any = None
    fallbacks: Any = None
    thread: Any = None
