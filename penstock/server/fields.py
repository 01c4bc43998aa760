"""The body fields that several routes share, and what becomes of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
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
from penstock.server.samplers import switch_off
from penstock.server.unknown import UnknownKeys, refuse_unknown
from penstock.types import MAX_BREAKER_CHARS, MAX_BREAKERS, MAX_DRY_LENGTH, SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_CHOICES = 128
MOST_TOP_LOGPROBS = 20
MOST_STOPS = 16
MAX_STOP_CHARS = 1_000
MAX_STOP_IDS = 1_024
MAX_ALLOWED_IDS = 1 << 18  # as many as the largest vocabularies have
MAX_BAD_WORDS = 1_000
MAX_BAD_WORD_CHARS = 200
MAX_BIASES = 10_000
MAX_SAMPLERS = 32  # also characters of a name
MAX_MESSAGES = 10_000
MAX_TOOLS = 128
WHOLE = 2**31 - 1

StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]


def _not_nothing(length: int) -> int:
    if length == 0:
        raise ValueError("give at least 1, or -1 for as many as fit")
    return length


Length = Annotated[int, Field(ge=-2, le=WHOLE), AfterValidator(_not_nothing)]  # below 0: as many as fit


class Body(Record):
    """A request's body or a part of it. A key that it does not know is passed over with a warning, or an error that
    names it: one that is misspelt or decides the answer always, any other where the server is told so."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=False)
    PASSED: ClassVar[frozenset[str]] = frozenset()  # passed over without a word
    DECISIVE: ClassVar[Mapping[str, str]] = {}  # refused, if they ask for something: by name, and why
    IS_LOOSE: ClassVar[bool] = False  # never refused for what is merely unknown

    @model_validator(mode="wrap")
    @classmethod
    def _sift(cls, values: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        known = _keys(cls)
        if not isinstance(values, dict):
            return handler(values)
        values = _drop_nulls(values, _nulls(cls))
        if values.keys() <= known:
            return handler(values)
        unknown = info.context.unknown if isinstance(info.context, Budget) else UnknownKeys(refuses=True)
        if unknown.refuses and not cls.IS_LOOSE:
            refuse_unknown(values, known)
        passed = unknown.judge(values, known, cls.DECISIVE, cls.PASSED)
        made = handler(values)
        unknown.add(passed)  # a union may try several bodies
        return made


@cache
def _keys(body: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in body.model_fields.items())


@cache
def _nulls(body: type[BaseModel]) -> frozenset[str]:
    """The keys for which null means the same as none: those that have a default, and a default other than null."""
    return frozenset(
        field.alias or name
        for name, field in body.model_fields.items()
        if not field.is_required() and field.get_default(call_default_factory=True) is not None
    )


def _drop_nulls(values: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Without the nulls that many clients write for what is not set."""
    null = {name for name in names if name in values and values[name] is None}
    return {name: value for name, value in values.items() if name not in null} if null else values


def undocumented(schema: dict[str, Any], names: Iterable[str]) -> None:
    """Leave fields out of a schema that are known only so that their refusal can say why."""
    for name in names:
        schema["properties"].pop(name, None)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None  # without effect: chunks are never padded


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
    bad_words: list[Annotated[str, Field(max_length=MAX_BAD_WORD_CHARS)]] | None = Field(None, max_length=MAX_BAD_WORDS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=WHOLE)
    priority: int = Field(0, ge=-WHOLE, le=WHOLE)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    return_token_ids: bool = False
    request_id: str | None = Field(None, max_length=128)
    timeout: float | None = Field(None, gt=0, le=1e6)
    # llama-server's
    n_predict: Length | None = None
    n_probs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    repeat_penalty: float | None = Field(None, gt=0, le=100)
    repeat_last_n: int | None = Field(None, ge=-1, le=WHOLE)
    dry_multiplier: float | None = Field(None, ge=0, le=1e6)
    dry_base: float | None = Field(None, ge=1, le=1e6)
    dry_allowed_length: int | None = Field(None, ge=0, le=MAX_DRY_LENGTH)
    dry_penalty_last_n: int | None = Field(None, ge=-1, le=WHOLE)
    dry_sequence_breakers: list[Annotated[str, Field(max_length=MAX_BREAKER_CHARS)]] | None = Field(
        None, max_length=MAX_BREAKERS
    )
    xtc_probability: float | None = Field(None, ge=0, le=1)
    xtc_threshold: float | None = Field(None, ge=0, le=1)
    mirostat: int | None = Field(None, ge=0, le=2)
    mirostat_tau: float | None = Field(None, ge=0, le=1e6)
    mirostat_eta: float | None = Field(None, ge=0, le=1)
    top_n_sigma: float | None = Field(None, ge=-1e6, le=1e6)
    dynatemp_range: float | None = Field(None, ge=0, le=1e6)
    dynatemp_exponent: float | None = Field(None, ge=0, le=1e6)
    samplers: (
        Annotated[str, Field(max_length=MAX_SAMPLERS)]
        | Annotated[list[Annotated[str, Field(max_length=MAX_SAMPLERS)]], Field(max_length=MAX_SAMPLERS)]
        | None
    ) = None
    # without effect: prefixes are always found again, wherever they were computed, and give the same answer
    cache_prompt: bool | None = None
    id_slot: int | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _as_map(cls, biases: Any) -> Any:
        """llama-server's [[token id, bias], …]; false for a token that must not come."""
        if not isinstance(biases, list):
            return biases
        if len(biases) > MAX_BIASES:
            raise ValueError(f"it has {len(biases)} entries: the limit is {MAX_BIASES}; send fewer")
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in biases):
            raise ValueError("Input should be an object, or a list of [token id, bias]")
        return {str(token): -100.0 if bias is False else bias for token, bias in biases}

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if isinstance(stop, list) and len(stop) > MOST_STOPS:
            raise ValueError(f"{len(stop)} stop strings: the limit is {MOST_STOPS}")
        return [one for one in stop if one] if isinstance(stop, list) else stop or None

    @model_validator(mode="after")
    def _synonyms(self) -> SamplingBody:
        for own, name in SYNONYMS.items():
            value = getattr(self, own)
            if value is None or name not in type(self).model_fields:
                continue
            if name in self.model_fields_set and getattr(self, name) not in (None, value):
                raise ValueError(f"{own}={value} and {name}={getattr(self, name)} mean the same: give one of them")
            setattr(self, name, value)
        return self

    @field_validator("allowed_token_ids")
    @classmethod
    def _once(cls, ids: list[int] | None) -> list[int] | None:
        """Name each token once: every row that is sampled goes through them."""
        return None if ids is None else list(dict.fromkeys(ids))


SYNONYMS = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
PLAIN = (
    "n",
    "temperature",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "stop",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "repeat_last_n",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "xtc_probability",
    "xtc_threshold",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "top_n_sigma",
    "dynatemp_range",
    "dynatemp_exponent",
)


def sampling_params(
    body: SamplingBody, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None, **more: Any
) -> SamplingParams:
    """The body's values over the model's own. A negative `max_tokens` is as many as fit, a seed of -1 another each
    time."""
    given = {name: value for name in PLAIN if (value := getattr(body, name)) is not None}
    if body.samplers is not None:
        given |= switch_off(body.samplers)
    if given.get("seed") == -1:
        del given["seed"]
    if max_tokens is not None and max_tokens < 0:
        max_tokens = None
    bias = {_token_id(key): value for key, value in (body.logit_bias or {}).items()}
    return defaults.clone(max_tokens=max_tokens, logprobs=logprobs, logit_bias=bias or None, **{**given, **more})


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 10:
        raise InvalidRequest(f"logit_bias: {shown(key)} is no token id: give whole numbers")
    return int(key)


Role = Literal["system", "developer", "user", "assistant", "tool"]
