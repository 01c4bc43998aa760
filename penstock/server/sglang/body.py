"""Body of SGLang's /generate, which may hold one prompt or a batch of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field, model_validator

from penstock.errors import InvalidRequest
from penstock.server.common.fields import (
    MAX_CHOICES,
    MAX_INT32,
    MAX_NAME_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    RequestBody,
    Speculation,
    StopString,
    read_speculation_body,
)
from penstock.server.common.structured_outputs import Source
from penstock.server.http.unknown_keys import NO_MEDIA
from penstock.types import SamplingParams, StructuredOutputsParams

MAX_PROMPTS = 2048
MAX_TOP = 64
DEFAULT_TOKENS = 128
NO_CODE = "the server runs no code of requests; give logit_bias in /v1/completions"
Kind = TypeVar("Kind")
Several = Annotated[list[Kind], Field(max_length=MAX_PROMPTS)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]


class SglangSampling(RequestBody):
    """Sampling parameters; what is not given is as the model's makers recommend."""

    DECISIVE: ClassVar[Mapping[str, str]] = {
        "custom_params": NO_CODE,
        "stop_regex": "give stop, or a regex for the whole answer",
        "max_tokens": "give max_new_tokens",
        "min_tokens": "give min_new_tokens",
        "seed": "give sampling_seed",
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset({"spaces_between_special_tokens", "stream_interval"})
    max_new_tokens: int | None = Field(DEFAULT_TOKENS, ge=0, le=MAX_INT32)  # 0: only the prompt
    min_new_tokens: int | None = Field(None, ge=0, le=MAX_INT32)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, le=1e6)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INT32)
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    sampling_seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_IDS)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=10_000)
    json_schema: Source | dict[str, Any] | None = None
    regex: Source | None = None
    ebnf: Source | None = None
    structural_tag: Source | dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_constraints(self) -> SglangSampling:
        given = [name for name in ("json_schema", "regex", "ebnf", "structural_tag") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each constrain the output: give one of them")
        return self

    def read_constraint(self) -> StructuredOutputsParams | None:
        for name, own in (("json_schema", "json"), ("regex", "regex"), ("ebnf", "grammar")):
            value = getattr(self, name)
            if value is not None:
                return StructuredOutputsParams(strict=False, **{own: value})
        if self.structural_tag is not None:
            return StructuredOutputsParams(strict=False, structural_tag=self.structural_tag)
        return None

    def to_sampling(self, defaults: SamplingParams, more: Mapping[str, Any]) -> SamplingParams:
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.sampling_seed,
            "min_tokens": self.min_new_tokens,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "include_stop_str_in_output": self.no_stop_trim,
            "structured_outputs": self.read_constraint(),
            "logit_bias": {_read_id(key): bias for key, bias in (self.logit_bias or {}).items()} or None,
        }
        values = {name: value for name, value in given.items() if value is not None}
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        max_tokens = None if self.max_new_tokens is None else max(1, self.max_new_tokens)
        return defaults.clone(n=self.n, max_tokens=max_tokens, stop=[one for one in stops if one], **{**values, **more})


def _read_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 10:
        raise InvalidRequest("logit_bias: give token ids, as whole numbers")
    return int(key)


class SglangBody(RequestBody):
    """Fields of /generate. In a batch, a field is one value for all prompts or a list with one for each."""

    DECISIVE: ClassVar[Mapping[str, str]] = {
        "input_embeds": "give text or input_ids",
        "image_data": NO_MEDIA,
        "video_data": NO_MEDIA,
        "audio_data": NO_MEDIA,
        "custom_logit_processor": NO_CODE,
        "return_hidden_states": "hidden states are not returned; leave it out",
        "session_params": "prefixes are cached without sessions; leave it out",
    }
    text: str | Several[str] | None = None
    input_ids: list[int] | Several[list[int]] | None = None
    sampling_params: SglangSampling | Several[SglangSampling] = SglangSampling.model_validate({})
    rid: Name | Several[Name] | None = None
    return_logprob: bool | Several[bool] = False
    logprob_start_len: int | Several[int] = -1
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_TOP)] | Several[Annotated[int, Field(ge=0, le=MAX_TOP)]] = 0
    token_ids_logprob: list[int] | Several[list[int]] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    lora_path: Name | Several[Name | None] | None = None
    priority: int = Field(0, ge=-MAX_INT32, le=MAX_INT32)
    # Penstock's
    speculation: Speculation = None
    include_applied: bool = False

    @property
    def is_batch(self) -> bool:
        given = self.text if self.text is not None else self.input_ids
        return isinstance(given, list) and not (given and isinstance(given[0], int))

    def prompts(self) -> list[str | list[int]]:
        given: Any = self.text if self.text is not None else self.input_ids
        return list(given) if self.is_batch else [given]

    def check_prompts(self) -> None:
        """Refuse a body without a prompt, and lists of other lengths than the batch."""
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give text or input_ids, or inputs as in TGI")
        count = len(self.prompts())
        if not count:
            raise ValueError("the batch is empty: give at least one prompt")
        for name in (*PER_PROMPT, "lora_path", "sampling_params", "rid"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != count:
                raise ValueError(f"{name} has {len(value)} entries for {count} prompts: give as many, or one for all")
        for number in range(count):
            self._check_token_ids(number)
        if isinstance(self.lora_path, list) and len(set(self.lora_path)) > 1:
            raise ValueError("the prompts of a batch use one adapter: send a request for each")

    def _check_token_ids(self, number: int) -> None:
        """Refuse logprobs of given tokens beside others: the engine reports either."""
        others = (
            ("top_logprobs_num", self.of_prompt("top_logprobs_num", number)),
            ("logprob_start_len", self.of_prompt("logprob_start_len", number) + 1),
        )
        taken = next((name for name, value in others if value), None)
        if self.token_ids_of(number) and taken is not None:
            raise ValueError(f"token_ids_logprob and {taken} exclude each other: give one of them")

    def token_ids_of(self, number: int) -> list[int]:
        """Return the tokens whose logprobs are asked for beside the sampled one's; a batch may have a list for each."""
        ids: Any = self.token_ids_logprob or []
        is_flat = all(isinstance(one, int) for one in ids)
        if not self.is_batch and not is_flat:
            raise ValueError("token_ids_logprob must be a flat list of integers for one prompt")
        if is_flat:
            return list(ids)
        if len(ids) != len(self.prompts()):
            raise ValueError(f"token_ids_logprob has {len(ids)} lists for {len(self.prompts())} prompts: give as many")
        return list(ids[number])

    def of_prompt(self, name: str, number: int) -> Any:
        value = getattr(self, name)
        return value[number] if isinstance(value, list) else value

    @property
    def adapter(self) -> str | None:
        return self.lora_path[0] if isinstance(self.lora_path, list) else self.lora_path

    def to_sampling(self, number: int, defaults: SamplingParams) -> SamplingParams:
        more: dict[str, Any] = {}
        if self.of_prompt("return_logprob", number):
            more["logprobs"] = self.of_prompt("top_logprobs_num", number)
            if ids := self.token_ids_of(number):
                more["logprob_token_ids"] = ids
            if self.of_prompt("logprob_start_len", number) >= 0:
                more["prompt_logprobs"] = self.of_prompt("top_logprobs_num", number)
        if self.speculation is not None:
            more["speculation"] = read_speculation_body(self.speculation)
        sampling: SglangSampling = self.of_prompt("sampling_params", number)
        return sampling.to_sampling(defaults, more)


PER_PROMPT = ("return_logprob", "logprob_start_len", "top_logprobs_num")
