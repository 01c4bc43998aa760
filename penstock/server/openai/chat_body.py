"""Body of /v1/chat/completions: all of OpenAI's fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from penstock.errors import quote
from penstock.server.common.beams import BeamBody
from penstock.server.common.fields import (
    MAX_INT32,
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    Length,
    RequestBody,
    Role,
    SamplingBody,
    hide_fields,
)
from penstock.server.common.structured_outputs import StructuredOutputsBody

IMAGE = "describe the image"
FILE = "send the file's text as {text}"
AUDIO = "send a transcript as {text}"
REMEDIES = {
    "image_url": IMAGE,
    "input_image": IMAGE,
    "image": IMAGE,
    "file": FILE,
    "input_file": FILE,
    "input_audio": AUDIO,
    "audio_url": AUDIO,
    "audio": AUDIO,
    "video_url": "describe the video",
    "input_video": "describe the video",
    "video": "describe the video",
}
MAX_TEMPLATE_CHARS = 1 << 17
MAX_DOCUMENTS = 1_000


def refuse_media(kind: str, text: str) -> None:
    """Refuse a content part that is not text; `text` is the type of text parts."""
    remedy = REMEDIES.get(kind)
    if remedy is not None:
        raise ValueError(
            f"content of type {quote(kind)} is not supported: models read text only: {remedy.format(text=text)}"
        )


class EchoedModel(RequestBody):
    """Part of an earlier response: clients echo it with all its fields."""

    ALLOWS_UNKNOWN: ClassVar[bool] = True


class ContentPart(EchoedModel):
    """A part of a message's content; only text is supported."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"annotations", "cache_control", "citations", "id", "logprobs", "prompt_cache_breakpoint"}
    )
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None


def _check_part(part: Any) -> Any:
    if isinstance(part, dict) and isinstance(part.get("type"), str):
        refuse_media(part["type"], "text")
    return part


class Prediction(RequestBody):
    """Text that the client expects in the answer, to be verified instead of generated token by token."""

    type: Literal["content"]
    content: str | list[Annotated[ContentPart, BeforeValidator(_check_part)]]

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text or "" for part in parts)


class ChatFunctionCall(EchoedModel):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(EchoedModel):
    IGNORED: ClassVar[frozenset[str]] = frozenset({"extra_content", "index", "provider_specific_fields"})
    id: str | None = None
    type: Literal["function"] = "function"
    function: ChatFunctionCall


class Message(EchoedModel):
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "annotations",
            "audio",
            "cache_control",
            "function_call",
            "id",
            "parsed",
            "provider_specific_fields",
            "reasoning",
            "reasoning_details",
            "refusal",
            "thinking_blocks",
            "type",
        }
    )
    role: Role
    content: str | list[Annotated[ContentPart, BeforeValidator(_check_part)]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _copy_reasoning(cls, values: Any) -> Any:
        """Copy vLLM's `reasoning` to the name that templates know."""
        if isinstance(values, dict) and isinstance(values.get("reasoning"), str):
            return {"reasoning_content": values["reasoning"], **values}
        return values

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and self.role not in ("assistant", "tool"):  # those may be empty
            raise ValueError(f"a message of role {self.role} needs content")
        return self

    @property
    def num_chars(self) -> int:
        if isinstance(self.content, list):
            return sum(len(part.text or part.refusal or "") for part in self.content)
        return len(self.content or "")

    def to_template(self) -> dict[str, Any]:
        """Convert for templates; `developer` becomes `system`."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text or part.refusal or "" for part in content)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content or "",
        }
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


class ChatFunction(RequestBody):
    name: str = Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.\-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(RequestBody):
    type: Literal["function"]
    function: ChatFunction


class NamedFunction(RequestBody):
    name: str


class NamedChoice(RequestBody):
    type: Literal["function"] = "function"  # huggingface_hub omits it
    function: NamedFunction


class AllowedTool(RequestBody):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(RequestBody):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedChoice(RequestBody):
    """Only these tools may be called; the prompt lists all."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @property
    def names(self) -> set[str]:
        return {tool.function.name for tool in self.allowed_tools.tools}


class ChatBody(SamplingBody, StructuredOutputsBody, BeamBody):
    model_config = ConfigDict(json_schema_extra=lambda schema: hide_fields(schema, REFUSED))
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    tools: list[ChatTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # vLLM's
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = Field(None, max_length=MAX_TEMPLATE_CHARS)
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[str | dict[str, Any]] | None = Field(None, max_length=MAX_DOCUMENTS)
    include_reasoning: bool = True
    thinking_token_budget: int | None = Field(None, ge=-1, le=MAX_INT32)
    prediction: Prediction | None = None
    # no effect
    metadata: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    verbosity: str | None = None
    # refused
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    moderation: Any = None
    web_search_options: Any = None

    @model_validator(mode="after")
    def _check_fields(self) -> ChatBody:
        for name, why in REFUSED.items():
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is not supported: {why}")
        if self.n_probs and self.logprobs is None:
            self.logprobs, self.top_logprobs = True, self.n_probs
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, (NamedChoice, AllowedChoice)):
            choice = self.tool_choice
            wanted = choice.names if isinstance(choice, AllowedChoice) else {choice.function.name}
            unknown = sorted(wanted - {tool.function.name for tool in self.tools or ()})
            if unknown:
                raise ValueError(f"tool_choice names {quote(unknown[0])}, which is not among the tools")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self


REFUSED: dict[str, str] = {
    "audio": "audio output is not supported; leave it out",
    "functions": "give tools instead",
    "function_call": "give tool_choice instead",
    "moderation": "moderation is not supported; leave it out",
    "web_search_options": "the server does not search the web; leave it out",
}
