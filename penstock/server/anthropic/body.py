"""Bodies of /v1/messages and /v1/messages/count_tokens: all of Anthropic's fields and blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from penstock.errors import quote
from penstock.server.common.fields import (
    MAX_INT32,
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    RequestBody,
    Speculation,
    StopString,
)
from penstock.server.openai.chat_body import EchoedModel

REFUSED_BLOCKS = {
    "image": "models read text only: describe the image",
    "document": "models read text only: send the document's text in a text block",
    "search_result": "send the result's text in a text block",
    "container_upload": "the server runs no containers",
}
REFUSED = {
    "compaction": "send the shorter conversation",
    "container": "the server runs no containers; leave it out",
    "fallbacks": "fallback models are not supported; leave it out",
    "mcp_servers": "the server calls no MCP servers; call them from the client and give their tools as custom tools",
    "thread": "the server stores no threads; send the whole conversation",
}


def _check_type(block: Any) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str) and kind not in BLOCK_TYPES:
        why = REFUSED_BLOCKS.get(kind, "use text, thinking, tool_use or tool_result")
        raise ValueError(f"content of type {quote(kind)} is not supported: {why}")
    return block


class ContentBlock(EchoedModel):
    """A block; these keys have no effect."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "caller", "citations", "id", "model", "stop_reason", "stop_sequence", "type", "usage"}
    )


class TextBlock(ContentBlock):
    type: Literal["text"]
    text: str


class ThinkingBlock(ContentBlock):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""  # no effect: nothing is signed


class RedactedThinkingBlock(ContentBlock):
    """Encrypted thinking. No effect: only Anthropic can read it."""

    type: Literal["redacted_thinking"]
    data: str = ""


class ToolUseBlock(ContentBlock):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Text = Annotated[TextBlock, BeforeValidator(_check_type)]


class ToolResultBlock(ContentBlock):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Text] | None = None
    is_error: bool = False


BLOCK_TYPES = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
UserContent = Annotated[
    Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")], BeforeValidator(_check_type)
]
AssistantContent = Annotated[
    Annotated[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")],
    BeforeValidator(_check_type),
]


class UserMessage(ContentBlock):
    role: Literal["user"]
    content: str | list[UserContent]


class AssistantMessage(ContentBlock):
    role: Literal["assistant"]
    content: str | list[AssistantContent]


class SystemMessage(ContentBlock):
    role: Literal["system"]
    content: str | list[Text]


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


def text_of(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


class AnthropicTool(RequestBody):
    name: str = Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.\-]+$")
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    # no effect: every tool is in the prompt
    allowed_callers: list[str] | None = None
    cache_control: Any = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: Any = None

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "custom"):
            raise ValueError(
                f"tools of type {quote(kind)} are not supported: give custom tools, with a name and an input_schema"
            )
        return tool


class ToolChoice(RequestBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("tool_choice needs a name if and only if its type is 'tool'")
        return self


class Thinking(RequestBody):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=0, le=MAX_INT32)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(RequestBody):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class PromptBody(RequestBody):
    """Fields that make the prompt."""

    DECISIVE: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "give max_tokens",
        "max_output_tokens": "give max_tokens",
        "response_format": "give output_config.format",
        "stop": "give stop_sequences",
    }
    model: str
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[Text] | None = None
    tools: list[AnthropicTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # older name of output_config.format
    # no effect
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
        """True if the output continues the last message."""
        return isinstance(self.messages[-1], AssistantMessage)

    @model_validator(mode="after")
    def _check_fields(self) -> PromptBody:
        for name, why in REFUSED.items():
            if getattr(self, name, None):
                raise ValueError(f"{name} is not supported: {why}")
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise ValueError("output_format and output_config.format mean the same: give output_config.format")
        names = [tool.name for tool in self.tools or ()]
        if self.tool_choice is not None and self.tool_choice.name is not None and self.tool_choice.name not in names:
            raise ValueError(f"tool_choice names {quote(self.tool_choice.name)}, which is not among the tools")
        last = self.messages[-1]
        if isinstance(last, AssistantMessage) and any(isinstance(part, ToolUseBlock) for part in last.content):
            raise ValueError("the last message calls tools: put a user message with their tool_result after it")
        return self


class CountTokensBody(PromptBody):
    pass


class MessagesBody(PromptBody):
    max_tokens: int = Field(ge=0, le=MAX_INT32)  # 0: only compute the prompt, for the prefix cache
    stop_sequences: list[StopString] | None = Field(None, max_length=MAX_STOPS)
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_INT32)
    # Penstock's
    speculation: Speculation = None
    include_applied: bool = False
    # no effect
    diagnostics: Any = None
    fallback_credit_token: Any = None
    inference_geo: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # refused
    container: Any = None
    fallbacks: Any = None
    thread: Any = None
