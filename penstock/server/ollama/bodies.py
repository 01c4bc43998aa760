"""Ollama's bodies: every field, and what becomes of it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from penstock.server.chat_body import Said, Tool
from penstock.server.fields import MAX_MESSAGES, MAX_TOOLS, MOST_TOP_LOGPROBS, WHOLE, Body
from penstock.server.ollama.duration import seconds
from penstock.server.ollama.options import OllamaOptions

MAX_DURATION_CHARS = 100
MAX_INPUTS = 2048
Think = bool | Literal["low", "medium", "high"]
REFUSED = {
    "images": "models here read text only; leave them out",
    "template": "a prompt is made by the model's own template; give raw=true and a prompt made by yours",
    "context": "it is another model's state; send the whole conversation to /api/chat instead",
}


class OllamaModelBody(Body):
    """What every route that runs a model takes. `name` is the older word for `model`."""

    model: str | None = None
    name: str | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None

    @field_validator("keep_alive", mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        if isinstance(given, str) and len(given) > MAX_DURATION_CHARS:
            raise ValueError(f"it has {len(given)} characters: give seconds, or a text like 5m or 1h30m")
        return given

    @field_validator("keep_alive")
    @classmethod
    def _a_duration(cls, given: float | str | None) -> float | None:
        return None if given is None or given == "" else seconds(given)

    @property
    def asked(self) -> OllamaOptions:
        return self.options or OllamaOptions.model_validate({})

    @property
    def unloads(self) -> bool:
        return self.keep_alive == 0


class OllamaAnswerBody(OllamaModelBody):
    stream: bool | None = None  # true where it is not given
    format: Literal["json", ""] | dict[str, Any] | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    # without effect: a prompt that is too long is refused
    truncate: bool | None = None
    shift: bool | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def common(self) -> dict[str, Any]:
        """What is the same in OpenAI's words, whatever the prompt is."""
        values = self.asked.sampling()
        if self.format == "json":
            values["response_format"] = {"type": "json_object"}
        elif self.format:
            values["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        return values

    def chat(self, messages: list[dict[str, Any]], tools: list[Tool] | None = None) -> dict[str, Any]:
        """The body of /v1/chat/completions that asks the same."""
        values = {**self.common(), "messages": messages, "logprobs": self.logprobs}
        if self.logprobs:
            values["top_logprobs"] = self.top_logprobs
        if tools:
            values["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
        if isinstance(self.think, str):
            values["reasoning_effort"] = self.think
        elif self.think is not None:
            values["chat_template_kwargs"] = {"enable_thinking": self.think}
        return values


class OllamaFunctionCall(Said):
    PASSED: ClassVar[frozenset[str]] = frozenset({"index"})
    name: str
    arguments: dict[str, Any] = {}


class OllamaToolCall(Said):
    PASSED: ClassVar[frozenset[str]] = frozenset({"type"})
    id: str | None = None
    function: OllamaFunctionCall


class OllamaMessage(Said):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    @field_validator("images", mode="before")
    @classmethod
    def _none(cls, images: Any) -> Any:
        if images:
            raise ValueError(f"images are not supported: {REFUSED['images']}")
        return images

    def openai(self) -> dict[str, Any]:
        said = {
            "role": self.role,
            "content": self.content,
            "reasoning_content": self.thinking,
            "name": self.tool_name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.model_dump() for call in self.tool_calls or ()],
        }
        return {name: value for name, value in said.items() if value is not None and value != []}


class OllamaChat(OllamaAnswerBody):
    messages: list[OllamaMessage] = Field([], max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)


class OllamaGenerate(OllamaAnswerBody):
    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None  # what follows the answer
    # refused, where they hold anything
    images: list[Any] | None = None
    template: str | None = None
    context: list[int] | None = None

    @field_validator("images", mode="before")
    @classmethod
    def _no_images(cls, images: Any) -> Any:
        """Refused before megabytes of them are looked at."""
        if images:
            raise ValueError(f"images is not supported: {REFUSED['images']}")
        return images

    @model_validator(mode="after")
    def _possible(self) -> OllamaGenerate:
        for name, why in REFUSED.items():
            if getattr(self, name):
                raise ValueError(f"{name} is not supported: {why}")
        return self

    def messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]


class OllamaEmbed(OllamaModelBody):
    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS)]
    truncate: bool | None = None  # true where it is not given
    dimensions: int | None = Field(None, ge=1, le=WHOLE)


class OllamaEmbeddings(OllamaModelBody):
    prompt: str


class OllamaShow(Body):
    model: str | None = None
    name: str | None = None
    # without effect
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: Any = None


class OllamaPull(Body):
    model: str | None = None
    name: str | None = None
    stream: bool | None = None  # true where it is not given
    insecure: bool | None = None  # without effect: every download is checked


class OllamaDelete(Body):
    model: str | None = None
    name: str | None = None
