"""The body of /v1/chat/completions: every field of OpenAI's, and what becomes of it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from penstock.errors import shown
from penstock.server.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MOST_TOP_LOGPROBS,
    WHOLE,
    Body,
    Length,
    Role,
    SamplingBody,
    undocumented,
)
from penstock.server.media import refuse_media
from penstock.server.structure import StructureBody

MAX_TEMPLATE_CHARS = 1 << 17
MAX_DOCUMENTS = 1_000


class Said(Body):
    """A part of what was said before: clients send answers back with all that came with them."""

    IS_LOOSE: ClassVar[bool] = True


class Part(Said):
    """A piece of a message's content; only text is understood."""

    PASSED: ClassVar[frozenset[str]] = frozenset(
        {"annotations", "cache_control", "citations", "id", "logprobs", "prompt_cache_breakpoint"}
    )
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None


def _known_part(part: Any) -> Any:
    if isinstance(part, dict) and isinstance(part.get("type"), str):
        refuse_media(part["type"], "text")
    return part


class FunctionCall(Said):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Said):
    PASSED: ClassVar[frozenset[str]] = frozenset({"extra_content", "index", "provider_specific_fields"})
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Said):
    PASSED: ClassVar[frozenset[str]] = frozenset(
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
    content: str | list[Annotated[Part, BeforeValidator(_known_part)]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _reasoned(cls, values: Any) -> Any:
        """Take vLLM's `reasoning` for the name that templates know."""
        if isinstance(values, dict) and isinstance(values.get("reasoning"), str):
            return {"reasoning_content": values["reasoning"], **values}
        return values

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role not in ("assistant", "tool"):  # those said, or gave back, nothing
            raise ValueError(f"a message of role {self.role} needs content")
        return self

    @property
    def num_chars(self) -> int:
        """Of its content."""
        if isinstance(self.content, list):
            return sum(len(part.text or part.refusal or "") for part in self.content)
        return len(self.content or "")

    def plain(self) -> dict[str, Any]:
        """As templates take it; a developer is a system."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text or part.refusal or "" for part in content)
        said: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content or ""}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                said[name] = getattr(self, name)
        if self.tool_calls:
            said["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return said


class Function(Body):
    name: str = Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.\-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"] = "function"  # huggingface_hub leaves it out
    function: NamedFunction


class AllowedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedChoice(Body):
    """The prompt describes every tool, and these may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @property
    def names(self) -> set[str]:
        return {tool.function.name for tool in self.allowed_tools.tools}


class ChatBody(SamplingBody, StructureBody):
    model_config = ConfigDict(json_schema_extra=lambda schema: undocumented(schema, REFUSED))
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
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
    thinking_token_budget: int | None = Field(None, ge=-1, le=WHOLE)
    # without effect here
    metadata: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: Any = None
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
    def _possible(self) -> ChatBody:
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
                raise ValueError(f"tool_choice names {shown(unknown[0])}, which is not among the tools")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self


REFUSED: dict[str, str] = {
    "audio": "models here speak no audio; leave it out",
    "functions": "give tools instead",
    "function_call": "give tool_choice instead",
    "moderation": "the server moderates nothing; leave it out",
    "web_search_options": "the server does not search the web; leave it out",
}
