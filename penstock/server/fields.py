"""The body fields that several routes share, and what becomes of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)

from penstock.errors import InvalidRequest, shown
from penstock.server.elsewhere import DECISIVE
from penstock.server.record import Budget, Record
from penstock.server.unknown import UnknownKeys, refuse_unknown
from penstock.types import SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_CHOICES = 128
MOST_TOP_LOGPROBS = 20
MOST_STOPS = 16
MAX_STOP_CHARS = 1_000
MAX_STOP_IDS = 1_024
MAX_ALLOWED_IDS = 1 << 18       # as many as the largest vocabularies have
MAX_BAD_WORDS = 1_000
MAX_BAD_WORD_CHARS = 200
MAX_BIASES = 10_000
MAX_MESSAGES = 10_000
MAX_TOOLS = 128
WHOLE = 2**31 - 1

StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]


class Body(Record):
    """A request's body or a part of it. A key that it does not know is passed over with a warning, or an error that
    names it: one that is misspelt or decides the answer always, any other where the server is told so."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=False)
    PASSED: ClassVar[frozenset[str]] = frozenset()          # passed over without a word
    DECISIVE: ClassVar[Mapping[str, str]] = {}              # refused, if they ask for something: by name, and why
    IS_LOOSE: ClassVar[bool] = False                        # never refused for what is merely unknown

    @model_validator(mode="wrap")
    @classmethod
    def _sift(cls, values: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        known = _keys(cls)
        if not isinstance(values, dict) or values.keys() <= known:
            return handler(values)
        unknown = info.context.unknown if isinstance(info.context, Budget) else UnknownKeys(refuses=True)
        if unknown.refuses and not cls.IS_LOOSE:
            refuse_unknown(values, known)
        passed = unknown.judge(values, known, cls.DECISIVE, cls.PASSED)
        made = handler(values)
        unknown.add(passed)                                 # a union may try several bodies
        return made


@cache
def _keys(body: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in body.model_fields.items())


def undocumented(schema: dict[str, Any], names: Iterable[str]) -> None:
    """Leave fields out of a schema that are known only so that their refusal can say why."""
    for name in names:
        schema["properties"].pop(name, None)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None         # without effect: chunks are never padded


class SamplingBody(Body):
    """Sampling values, OpenAI's and vLLM's, under their own names."""

    DECISIVE: ClassVar[Mapping[str, str]] = DECISIVE
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_BIASES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopString | list[StopString] | None = None
    user: str | None = None
    # vLLM's
    top_k: int | None = Field(None, ge=-1, le=WHOLE)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0, le=WHOLE)
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_IDS)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = Field(None, max_length=MAX_ALLOWED_IDS)
    bad_words: list[Annotated[str, Field(max_length=MAX_BAD_WORD_CHARS)]] | None = Field(
        None, max_length=MAX_BAD_WORDS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=WHOLE)
    priority: int = Field(0, ge=-WHOLE, le=WHOLE)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    return_token_ids: bool = False
    request_id: str | None = Field(None, max_length=128)
    timeout: float | None = Field(None, gt=0, le=1e6)

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if isinstance(stop, list) and len(stop) > MOST_STOPS:
            raise ValueError(f"{len(stop)} stop strings: the limit is {MOST_STOPS}")
        return [one for one in stop if one] if isinstance(stop, list) else stop or None

    @field_validator("allowed_token_ids")
    @classmethod
    def _once(cls, ids: list[int] | None) -> list[int] | None:
        """Name each token once: every row that is sampled goes through them."""
        return None if ids is None else list(dict.fromkeys(ids))


PLAIN = ("n", "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop", "top_k", "min_p",
         "typical_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
         "skip_special_tokens", "allowed_token_ids", "bad_words", "prompt_logprobs", "truncate_prompt_tokens")


def sampling_params(body: SamplingBody, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None,
                    **more: Any) -> SamplingParams:
    """The body's values over the model's own."""
    given = {name: value for name in PLAIN if (value := getattr(body, name)) is not None}
    bias = {_token_id(key): value for key, value in (body.logit_bias or {}).items()}
    return defaults.clone(**given, max_tokens=max_tokens, logprobs=logprobs, logit_bias=bias or None, **more)


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 10:
        raise InvalidRequest(f"logit_bias: {shown(key)} is no token id: give whole numbers")
    return int(key)


Role = Literal["system", "developer", "user", "assistant", "tool"]
