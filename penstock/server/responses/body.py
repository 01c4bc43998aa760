"""Body of /v1/responses: all of OpenAI's fields, input items and tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from penstock.errors import quote
from penstock.server.common.chat_prompt import ChatHistory
from penstock.server.common.fields import (
    MAX_INT32,
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    RequestBody,
    Speculation,
    StreamOptions,
)
from penstock.server.http.context import new_id
from penstock.server.openai.chat_body import EchoedModel, refuse_media

REFUSED_ITEMS = {
    "item_reference": "send the item itself, or previous_response_id",
    "compaction": "it cannot be read: send the conversation",
}
LOGPROBS = "message.output_text.logprobs"
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]  # OpenAI's limits
REFUSED = {
    "context_management": "conversations are not compacted; leave it out, or cut them with truncation='auto'",
    "conversation": "the server keeps no conversations; use previous_response_id, or send the items",
    "moderation": "moderation is not supported; leave it out",
    "personality": "put it into instructions",
    "prompt": "the server keeps no prompts; send instructions and input",
}


def _check_part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in ("input_text", "output_text", "text", "refusal"):
        refuse_media(kind, "input_text")
        raise ValueError(f"content of type {quote(kind)} is not supported: use input_text or output_text")
    return part


class InputItem(EchoedModel):
    """Base of items; these echoed keys have no effect."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "annotations",
            "created_by",
            "encrypted_content",
            "id",
            "logprobs",
            "namespace",
            "parsed",
            "parsed_arguments",
            "phase",
            "status",
            "type",
        }
    )


class InputPart(InputItem):
    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str | None = None
    refusal: str | None = None


Content = str | list[Annotated[InputPart, BeforeValidator(_check_part)]]


class InputMessage(InputItem):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(InputItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(InputItem):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningText(InputItem):
    text: str


class ReasoningItem(InputItem):
    type: Literal["reasoning"]
    summary: list[ReasoningText] = []
    content: list[ReasoningText] | None = None


ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


def _check_type(item: Any) -> Any:
    kind = _find_type(item)
    if kind not in ITEM_TYPES:
        why = REFUSED_ITEMS.get(kind, f"use one of {', '.join(ITEM_TYPES)}")
        raise ValueError(f"an item of type {quote(kind)} is not supported: {why}")
    return item


def _find_type(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


Item = Annotated[
    Annotated[
        Annotated[InputMessage, Tag("message")]
        | Annotated[FunctionCallItem, Tag("function_call")]
        | Annotated[FunctionCallOutput, Tag("function_call_output")]
        | Annotated[ReasoningItem, Tag("reasoning")],
        Discriminator(_find_type),
    ],
    BeforeValidator(_check_type),
]


def text_of(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text or part.refusal or "" for part in content)


def add_to_history(items: Sequence[Item], history: ChatHistory) -> None:
    for item in items:
        if isinstance(item, InputMessage):
            history.add_text("system" if item.role == "developer" else item.role, text_of(item.content))
        elif isinstance(item, FunctionCallItem):
            history.add_call(item.call_id, item.name, item.arguments)
        elif isinstance(item, FunctionCallOutput):
            history.add_result(item.call_id, text_of(item.output))
        else:
            history.add_reasoning("\n".join(part.text for part in item.content or item.summary))


def list_item(item: Item) -> dict[str, Any]:
    """Format an item as it is stored and listed, with an id."""
    formatted = item.model_dump(exclude_none=True)
    if isinstance(item, InputMessage):
        kind = "output_text" if item.role == "assistant" else "input_text"
        if isinstance(item.content, str):
            formatted["content"] = [{"type": kind, "text": item.content}]
        formatted["content"] = [
            {**part, "annotations": []} if part["type"] == "output_text" else part for part in formatted["content"]
        ]
        return {"id": new_id("msg_"), "status": "completed", **formatted}
    if isinstance(item, ReasoningItem):
        formatted["summary"] = [{"type": "summary_text", **part} for part in formatted["summary"]]
        if item.content is not None:
            formatted["content"] = [{"type": "reasoning_text", **part} for part in formatted["content"]]
        return {"id": new_id("rs_"), **formatted}
    return {"id": new_id("fc_"), "status": "completed", **formatted}


class FunctionTool(RequestBody):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.\-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    # no effect: every tool is in the prompt
    allowed_callers: list[str] | None = None
    async_: bool | None = Field(None, alias="async")
    defer_loading: bool | None = None
    output_schema: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise ValueError(
                f"tools of type {quote(kind)} are not supported: the server runs no built-in tools; give functions"
            )
        return tool

    def to_chat(self) -> dict[str, Any]:
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }
        return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}

    def as_json(self) -> dict[str, Any]:
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict if self.strict is not None else False,
        }


class NamedToolChoice(RequestBody):
    type: Literal["function"]
    name: str


class AllowedToolChoice(RequestBody):
    """Only these tools may be called; the prompt lists all."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice] = Field(min_length=1, max_length=MAX_TOOLS)


def _check_choice(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind not in ("function", "allowed_tools"):
        raise ValueError(
            f"tool_choice of type {quote(kind)} is not supported: choose none, auto, required, a function "
            "or allowed_tools"
        )
    return choice


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice, BeforeValidator(_check_choice)
]


def translate_tools(tools: list[FunctionTool] | None, choice: ToolChoice | None) -> dict[str, Any]:
    """Translate to a chat body's tools and tool_choice."""
    tools = tools or []
    if isinstance(choice, (NamedToolChoice, AllowedToolChoice)):
        wanted = [choice.name] if isinstance(choice, NamedToolChoice) else [one.name for one in choice.tools]
        unknown = set(wanted) - {tool.name for tool in tools}
        if unknown:
            raise ValueError(f"tool_choice names {', '.join(map(quote, sorted(unknown)[:3]))}, not among the tools")
    if isinstance(choice, NamedToolChoice):
        return {
            "tools": [tool.to_chat() for tool in tools],
            "tool_choice": {"type": "function", "function": {"name": choice.name}},
        }
    if isinstance(choice, AllowedToolChoice):
        allowed = [{"type": "function", "function": {"name": one.name}} for one in choice.tools]
        return {
            "tools": [tool.to_chat() for tool in tools],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": allowed}},
        }
    return {"tools": [tool.to_chat() for tool in tools] or None, "tool_choice": choice}


class ReasoningConfig(RequestBody):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # no effect: reasoning is returned as it is
    context: str | None = None
    generate_summary: str | None = None
    mode: str | None = None
    summary: str | None = None


class TextFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("a format of type json_schema needs a schema")
        return self

    def to_chat(self) -> dict[str, Any]:
        if self.type == "json_schema":
            return {
                "type": self.type,
                "json_schema": {"name": self.name or "schema", "schema": self.schema_, "strict": self.strict},
            }
        return {"type": self.type}


class TextConfig(RequestBody):
    format: TextFormat | None = None
    verbosity: str | None = None  # no effect


class InputBody(RequestBody):
    """Fields that make the prompt."""

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
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tool_choice: ToolChoice | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
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
    def _check_fields(self) -> InputBody:
        for name, why in REFUSED.items():
            if getattr(self, name, None):
                raise ValueError(f"{name} is not supported: {why}")
        if not self.items and self.previous_response_id is None:
            raise ValueError("input is needed: give a text or a list of items")
        translate_tools(self.tools, self.tool_choice)
        return self


class InputTokensBody(InputBody):
    pass


class ResponsesBody(InputBody):
    background: bool | None = None
    include: list[str] | None = None  # only logprobs has an effect
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    metadata: Metadata | None = None  # echoed
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    top_p: float | None = Field(None, gt=0, le=1)
    # Penstock's
    speculation: Speculation = None
    include_applied: bool = False
    # no effect
    access_programs: Any = None
    image: Any = None
    max_tool_calls: int | None = None  # of built-in tools, which there are none
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
    def _check_store(self) -> ResponsesBody:
        if self.background and self.store is False:
            raise ValueError("background responses are stored until fetched: leave store=false out")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())
