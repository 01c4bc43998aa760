"""Ollama's bodies: all fields."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from penstock.errors import quote
from penstock.server.common.fields import (
    MAX_INT32,
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    RequestBody,
    Speculation,
    StopString,
)
from penstock.server.model import ServedModel
from penstock.server.openai.chat_body import ChatTool, EchoedModel
from penstock.types import SamplingParams

UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_PART = re.compile(r"(\d{1,12}(?:\.\d{0,9})?)(ns|us|µs|ms|s|m|h)")
_BARE = re.compile(r"\d{1,12}(?:\.\d{0,9})?")
# Ollama's defaults, for models without their own
OLLAMA_DEFAULTS: Mapping[str, float] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.0,
    "repetition_penalty": 1.1,
    "repeat_last_n": 64,
}
RENAMED = {"repeat_penalty": "repetition_penalty"}
SAME_NAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repeat_last_n",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
)
# fixed when the server starts, or dropped by Ollama itself
NO_EFFECT = (
    "num_keep",
    "num_batch",
    "num_gpu",
    "num_gqa",
    "num_thread",
    "main_gpu",
    "numa",
    "low_vram",
    "f16_kv",
    "use_mmap",
    "use_mlock",
    "vocab_only",
    "logits_all",
    "embedding_only",
    "rope_frequency_base",
    "rope_frequency_scale",
    "tfs_z",
    "penalize_newline",
)
MAX_DURATION_CHARS = 100
MAX_INPUTS = 2048
Think = bool | Literal["low", "medium", "high"]
REFUSED = {
    "images": "models read text only; leave them out",
    "template": "only the model's own template is used; give raw=true and a rendered prompt",
    "context": "token contexts are not supported; send the whole conversation to /api/chat",
}


def parse_duration(value: float | str) -> float:
    """Convert to seconds; negative means forever."""
    if isinstance(value, str):
        value = _parse(value.strip())
    if math.isnan(value):
        raise ValueError("a duration must be a number")
    return math.inf if value < 0 else float(value)


def _parse(text: str) -> float:
    sign = -1.0 if text.startswith("-") else 1.0
    digits = text.lstrip("+-") if text[:2] not in ("--", "+-", "-+", "++") else ""
    if _BARE.fullmatch(digits):
        return sign * float(digits)
    parts = _PART.findall(digits)
    if not parts or "".join(number + unit for number, unit in parts) != digits:
        raise ValueError(f"{text[:40]!r} is not a duration: give seconds, or a text like 5m or 1h30m; -1 is forever")
    return sign * sum(float(number) * UNITS_S[unit] for number, unit in parts)


class OllamaOptions(RequestBody):
    num_predict: int | None = Field(None, ge=-2, le=MAX_INT32)  # <= 0: as many as fit
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: int | None = Field(None, ge=-1, le=MAX_INT32)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)  # -1: random
    stop: StopString | list[StopString] | None = None
    repeat_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repeat_last_n: int | None = Field(None, ge=-1, le=MAX_INT32)
    mirostat: int | None = Field(None, ge=0, le=2)
    mirostat_tau: float | None = Field(None, ge=0, le=1e6)
    mirostat_eta: float | None = Field(None, ge=0, le=1)
    # no effect, with a warning
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_gqa: int | None = None
    num_thread: int | None = None
    main_gpu: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    vocab_only: bool | None = None
    logits_all: bool | None = None
    embedding_only: bool | None = None
    rope_frequency_base: float | None = None
    rope_frequency_scale: float | None = None
    tfs_z: float | None = None
    penalize_newline: bool | None = None

    def to_sampling(self) -> dict[str, Any]:
        """Translate to OpenAI's and vLLM's names; max_tokens follows once the prompt's length is known."""
        values = {name: getattr(self, name) for name in SAME_NAME}
        values |= {name: getattr(self, own) for own, name in RENAMED.items()}
        values["seed"] = None if self.seed == -1 else self.seed
        return {name: value for name, value in values.items() if value is not None}

    def list_warnings(self, max_model_len: int) -> list[str]:
        idle = [name for name in NO_EFFECT if getattr(self, name) not in (None, False)]
        warnings = [f"options have no effect: {', '.join(idle)}"] if idle else []
        if self.num_ctx is not None and self.num_ctx > max_model_len:
            warnings.append(
                f"num_ctx={quote(self.num_ctx)} has no effect: the context length is {max_model_len}; "
                "raise --max-model-len"
            )
        return warnings

    def max_tokens(self, room: int) -> int | None:
        """Limit the output to `room`, as Ollama does; None means all of it."""
        wanted = self.num_predict or -1
        return wanted if 0 < wanted <= room else None


def make_defaults(model: ServedModel) -> SamplingParams:
    """Make the sampling parameters that a body leaves open."""
    return model.defaults.clone(**model.found_defaults.yield_to(OLLAMA_DEFAULTS))


class OllamaNameBody(RequestBody):
    """Body that names a model; `name` is an older name of `model`."""

    model: str | None = None
    name: str | None = None


class OllamaModelBody(OllamaNameBody):
    """Fields of every route that runs a model."""

    options: OllamaOptions | None = None
    keep_alive: float | str | None = None

    @field_validator("keep_alive", mode="before")
    @classmethod
    def _check_length(cls, value: Any) -> Any:
        if isinstance(value, str) and len(value) > MAX_DURATION_CHARS:
            raise ValueError(f"it has {len(value)} characters: give seconds, or a text like 5m or 1h30m")
        return value

    @field_validator("keep_alive")
    @classmethod
    def _parse_keep_alive(cls, value: float | str | None) -> float | None:
        return None if value is None or value == "" else parse_duration(value)

    @property
    def options_or_default(self) -> OllamaOptions:
        return self.options or OllamaOptions.model_validate({})

    @property
    def unloads(self) -> bool:
        return self.keep_alive == 0


class OllamaAnswerBody(OllamaModelBody):
    stream: bool | None = None  # default true
    format: Literal["json", ""] | dict[str, Any] | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    # Penstock's
    speculation: Speculation = None
    include_applied: bool = False
    # no effect: a prompt that is too long is refused
    truncate: bool | None = None
    shift: bool | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def to_common(self) -> dict[str, Any]:
        """Translate the fields that do not depend on the prompt."""
        values = self.options_or_default.to_sampling()
        values |= {"speculation": self.speculation, "include_applied": self.include_applied}
        if self.format == "json":
            values["response_format"] = {"type": "json_object"}
        elif self.format:
            values["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        return values

    def to_chat(self, messages: list[dict[str, Any]], tools: list[ChatTool] | None = None) -> dict[str, Any]:
        """Translate to a body of /v1/chat/completions."""
        values = {**self.to_common(), "messages": messages, "logprobs": self.logprobs}
        if self.logprobs:
            values["top_logprobs"] = self.top_logprobs
        if tools:
            values["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
        if isinstance(self.think, str):
            values["reasoning_effort"] = self.think
        elif self.think is not None:
            values["chat_template_kwargs"] = {"enable_thinking": self.think}
        return values


class OllamaFunctionCall(EchoedModel):
    IGNORED: ClassVar[frozenset[str]] = frozenset({"index"})
    name: str
    arguments: dict[str, Any] = {}


class OllamaToolCall(EchoedModel):
    IGNORED: ClassVar[frozenset[str]] = frozenset({"type"})
    id: str | None = None
    function: OllamaFunctionCall


class OllamaMessage(EchoedModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    @field_validator("images", mode="before")
    @classmethod
    def _refuse_images(cls, images: Any) -> Any:
        if images:
            raise ValueError(f"images are not supported: {REFUSED['images']}")
        return images

    def to_openai(self) -> dict[str, Any]:
        message = {
            "role": self.role,
            "content": self.content,
            "reasoning_content": self.thinking,
            "name": self.tool_name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.model_dump() for call in self.tool_calls or ()],
        }
        return {name: value for name, value in message.items() if value is not None and value != []}


class OllamaChat(OllamaAnswerBody):
    messages: list[OllamaMessage] = Field([], max_length=MAX_MESSAGES)
    tools: list[ChatTool] | None = Field(None, max_length=MAX_TOOLS)


class OllamaGenerate(OllamaAnswerBody):
    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None  # text after the output
    # refused if set
    images: list[Any] | None = None
    template: str | None = None
    context: list[int] | None = None

    @field_validator("images", mode="before")
    @classmethod
    def _refuse_images(cls, images: Any) -> Any:
        """Refuse before megabytes of them are validated."""
        if images:
            raise ValueError(f"images is not supported: {REFUSED['images']}")
        return images

    @model_validator(mode="after")
    def _check_fields(self) -> OllamaGenerate:
        for name, why in REFUSED.items():
            if getattr(self, name):
                raise ValueError(f"{name} is not supported: {why}")
        return self

    def messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]


class OllamaEmbed(OllamaModelBody):
    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS)]
    truncate: bool | None = None  # default true
    dimensions: int | None = Field(None, ge=1, le=MAX_INT32)


class OllamaEmbeddings(OllamaModelBody):
    prompt: str


class OllamaShow(OllamaNameBody):
    # no effect
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: Any = None


class OllamaPull(OllamaNameBody):
    stream: bool | None = None  # default true
    insecure: bool | None = None  # no effect: every download is verified


class OllamaDelete(OllamaNameBody):
    pass
