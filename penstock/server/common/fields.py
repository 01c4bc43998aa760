"""Body fields shared by several routes."""

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

from penstock.errors import InvalidRequest, quote
from penstock.server.http.decode import BoundedModel, JsonBudget
from penstock.server.http.unknown_keys import DECISIVE, MAX_EDITS, UnknownKeys, count_edits, refuse_unknown
from penstock.types import (
    MAX_BREAKER_CHARS,
    MAX_BREAKERS,
    MAX_DRY_LENGTH,
    MAX_LOGPROBS,
    SamplingParams,
    SpeculationParams,
)
from penstock.types.lora import MAX_LORAS, MAX_SCALE
from penstock.types.sampling import MAX_SESSION_CHARS as MAX_SESSION_CHARS
from penstock.types.speculation import MAX_DRAFT, METHODS

if TYPE_CHECKING:
    from typing_extensions import Self

# the values that disable each sampler
OFF: Mapping[str, Mapping[str, Any]] = {
    "penalties": {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
}
LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
}
ALIASES = {"typical_p": "typ_p", "typical": "typ_p", "temp": "temperature", "i": "infill"}
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1_000
MAX_STOP_IDS = 1_024
MAX_ALLOWED_IDS = 1 << 18  # the largest vocabularies
MAX_BAD_WORDS = 1_000
MAX_BAD_WORD_CHARS = 200
MAX_BIASES = 10_000
MAX_SAMPLERS = 32  # also the length of a name
MAX_MESSAGES = 10_000
MAX_NAME_CHARS = 512  # of a model or an adapter
MAX_TOOLS = 128
MAX_INT32 = 2**31 - 1
StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]


def disable_others(samplers: str | list[str]) -> dict[str, Any]:
    """Return values that leave only `samplers` enabled; a string has one letter per sampler."""
    names = [
        ALIASES.get(name, name)
        for name in (samplers if isinstance(samplers, list) else [LETTERS.get(char, char) for char in samplers])
    ]
    unknown = next((name for name in names if name not in OFF and name != "infill"), None)
    if unknown is not None:
        raise InvalidRequest(f"samplers: {quote(unknown)} is none of {', '.join(OFF)}")
    return {name: value for sampler, values in OFF.items() if sampler not in names for name, value in values.items()}


def _refuse_zero(length: int) -> int:
    if length == 0:
        raise ValueError("give at least 1, or -1 for as many as fit")
    return length


Length = Annotated[int, Field(ge=-2, le=MAX_INT32), AfterValidator(_refuse_zero)]  # negative: as many as fit


class RequestBody(BoundedModel):
    """Base of bodies. Unknown keys are ignored with a warning; misspelt and decisive ones are errors, and all of them
    with --unknown-fields refuse."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=False)
    IGNORED: ClassVar[frozenset[str]] = frozenset()  # ignored silently
    DECISIVE: ClassVar[Mapping[str, str]] = {}  # refused if set, with the reason
    ALLOWS_UNKNOWN: ClassVar[bool] = False  # unknown keys are never errors

    @model_validator(mode="wrap")
    @classmethod
    def _check_keys(cls, values: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        known = _list_keys(cls)
        if not isinstance(values, dict):
            return handler(values)
        values = _drop_nulls(values, _list_nullable(cls))
        if values.keys() <= known:
            return handler(values)
        unknown = info.context.unknown if isinstance(info.context, JsonBudget) else UnknownKeys(refuses=True)
        if unknown.refuses and not cls.ALLOWS_UNKNOWN:
            refuse_unknown(values, known)
        ignored = unknown.judge(values, known, cls.DECISIVE, cls.IGNORED)
        made = handler(values)
        unknown.add(ignored)  # only once it is valid: a union tries several bodies
        return made


@cache
def _list_keys(body: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in body.model_fields.items())


@cache
def _list_nullable(body: type[BaseModel]) -> frozenset[str]:
    """List keys where null means unset: those with a default other than null."""
    return frozenset(
        field.alias or name
        for name, field in body.model_fields.items()
        if not field.is_required() and field.get_default(call_default_factory=True) is not None
    )


def _drop_nulls(values: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Drop the nulls that clients send for unset fields."""
    null = {name for name in names if name in values and values[name] is None}
    return {name: value for name, value in values.items() if name not in null} if null else values


def hide_fields(schema: dict[str, Any], names: Iterable[str]) -> None:
    """Remove fields from a schema that exist only to be refused with a reason."""
    for name in names:
        schema["properties"].pop(name, None)


class SpeculationBody(RequestBody):
    """Limits of drafts, for one request."""

    method: Annotated[str, Field(max_length=32, json_schema_extra={"enum": list(METHODS)})] | None = None
    num_speculative_tokens: int | None = Field(None, ge=1, le=MAX_DRAFT)


Speculation = SpeculationBody | Literal[False] | None  # false: no drafts; null: as the server is set


def read_speculation_body(body: Speculation) -> SpeculationParams | bool | None:
    return SpeculationParams(**body.model_dump()) if isinstance(body, SpeculationBody) else body


class LoraScale(RequestBody):
    """An adapter by its id in GET /lora-adapters, and the factor of what it adds."""

    id: int = Field(ge=0, le=MAX_INT32)
    scale: float = Field(ge=-MAX_SCALE, le=MAX_SCALE)


Loras = Annotated[list[LoraScale], Field(max_length=MAX_LORAS)]


class StreamOptions(RequestBody):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None  # no effect: chunks are not padded


def name_slot(id: int) -> str:
    """Name the session of llama-server's slot."""
    return f"slot {id}"


class SamplingBody(RequestBody):
    """Sampling parameters of OpenAI, vLLM and llama-server."""

    DECISIVE: ClassVar[Mapping[str, str]] = DECISIVE
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_BIASES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopString | list[StopString] | None = None
    user: str | None = None
    # vLLM's
    top_k: int | None = Field(None, ge=-1, le=MAX_INT32)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT32)
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_IDS)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = Field(None, max_length=MAX_ALLOWED_IDS)
    bad_words: list[Annotated[str, Field(max_length=MAX_BAD_WORD_CHARS)]] | None = Field(None, max_length=MAX_BAD_WORDS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    logprob_token_ids: list[int] | None = Field(None, max_length=MAX_LOGPROBS)
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    truncation_side: Literal["left", "right"] | None = None
    return_tokens_as_token_ids: bool = False
    priority: int = Field(0, ge=-MAX_INT32, le=MAX_INT32)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    session: str | None = Field(None, min_length=1, max_length=MAX_SESSION_CHARS)
    session_ttl: float = Field(600.0, gt=0, le=86400)  # seconds after the answer
    cache_priority: int = Field(0, ge=0, le=100)
    return_token_ids: bool = False
    request_id: str | None = Field(None, max_length=128)
    timeout: float | None = Field(None, gt=0, le=1e6)
    # SGLang's
    rid: str | None = Field(None, max_length=128)
    no_stop_trim: bool | None = None
    lora_path: str | None = Field(None, max_length=MAX_NAME_CHARS)  # an adapter's name
    # llama-server's
    n_predict: Length | None = None
    n_cmpl: int | None = Field(None, ge=1, le=MAX_CHOICES)
    n_probs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    post_sampling_probs: bool | None = None
    repeat_penalty: float | None = Field(None, gt=0, le=100)
    repeat_last_n: int | None = Field(None, ge=-1, le=MAX_INT32)
    dry_multiplier: float | None = Field(None, ge=0, le=1e6)
    dry_base: float | None = Field(None, ge=1, le=1e6)
    dry_allowed_length: int | None = Field(None, ge=0, le=MAX_DRY_LENGTH)
    dry_penalty_last_n: int | None = Field(None, ge=-1, le=MAX_INT32)
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
    lora: Loras | None = None
    timings_per_token: bool = False
    # Penstock's
    speculation: Speculation = None
    include_applied: bool = False  # the ledger with the answer
    id_slot: int | None = None  # without `session`, the session of that slot; -1 for none
    # no effect: prefixes are always cached
    cache_prompt: bool | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _convert_bias(cls, biases: Any) -> Any:
        """Convert llama-server's [[token id, bias], …]; false bans a token."""
        if not isinstance(biases, list):
            return biases
        if len(biases) > MAX_BIASES:
            raise ValueError(f"it has {len(biases)} entries: the limit is {MAX_BIASES}; send fewer")
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in biases):
            raise ValueError("Input should be an object, or a list of [token id, bias]")
        return {str(token): -100.0 if bias is False else bias for token, bias in biases}

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if isinstance(stop, list) and len(stop) > MAX_STOPS:
            raise ValueError(f"{len(stop)} stop strings: the limit is {MAX_STOPS}")
        return [one for one in stop if one] if isinstance(stop, list) else stop or None

    @model_validator(mode="after")
    def _merge_synonyms(self) -> SamplingBody:
        self.model = self.lora_path or self.model
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
    def _drop_duplicates(cls, ids: list[int] | None) -> list[int] | None:
        """Keep each token once: every sampled row applies the list."""
        return None if ids is None else list(dict.fromkeys(ids))


SYNONYMS = {
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "n_cmpl": "n",
    "rid": "request_id",
    "no_stop_trim": "include_stop_str_in_output",
}
SAMPLING_FIELDS = (
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
    "logprob_token_ids",
    "truncate_prompt_tokens",
    "truncation_side",
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
    "post_sampling_probs",
)


def make_sampling_params(
    body: SamplingBody, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None, **more: Any
) -> SamplingParams:
    """Merge the body's values over `defaults`. A negative `max_tokens` means as many as fit; seed -1 a random one."""
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    if body.samplers is not None:
        given |= disable_others(body.samplers)
    if given.get("seed") == -1:
        del given["seed"]
    if max_tokens is not None and max_tokens < 0:
        max_tokens = None
    if body.speculation is not None:
        given["speculation"] = read_speculation_body(body.speculation)
    bias = {_parse_token_id(key): value for key, value in (body.logit_bias or {}).items()}
    return defaults.clone(max_tokens=max_tokens, logprobs=logprobs, logit_bias=bias or None, **{**given, **more})


def _parse_token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 10:
        raise InvalidRequest(f"logit_bias: {quote(key)} is not a token id: give whole numbers")
    return int(key)


ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def _check_role(role: str) -> str:
    meant = next((one for one in ROLES if role != one and count_edits(role, one) <= MAX_EDITS), None)
    if meant is not None and role not in ROLES:
        raise ValueError(f"{quote(role)} is no role: did you mean {meant!r}?")
    return role


# The chat template decides which roles it knows.
Role = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_check_role)]
