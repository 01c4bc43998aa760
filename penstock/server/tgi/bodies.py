"""TGI's bodies: every parameter, and what becomes of it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from penstock.server.fields import MOST_STOPS, WHOLE, Body, StopString
from penstock.server.structure import Source
from penstock.types import SamplingParams, StructuredOutputsParams

DEFAULT_TOKENS = 100
MOST_BEST_OF = 16
MOST_TOP_TOKENS = 20


class TgiSchema(Body):
    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class TgiJson(Body):
    type: Literal["json"]
    value: Source | dict[str, Any]


class TgiRegex(Body):
    type: Literal["regex"]
    value: Source


class TgiJsonSchema(Body):
    type: Literal["json_schema"]
    value: TgiSchema


class TgiParameters(Body):
    """Answers are greedy unless sampling is asked for, by do_sample or by a value that only sampling uses."""

    best_of: int | None = Field(None, ge=1, le=MOST_BEST_OF)
    temperature: float | None = Field(None, gt=0, le=100)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    top_k: int | None = Field(None, ge=1, le=WHOLE)
    top_p: float | None = Field(None, gt=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    do_sample: bool = False
    max_new_tokens: int | None = Field(None, ge=1, le=WHOLE)
    return_full_text: bool | None = None
    stop: list[StopString] | None = Field(None, max_length=MOST_STOPS)
    truncate: int | None = Field(None, ge=1, le=WHOLE)
    details: bool = False
    decoder_input_details: bool = False
    seed: int | None = Field(None, ge=0, lt=2**64)
    top_n_tokens: int | None = Field(None, ge=0, le=MOST_TOP_TOKENS)
    grammar: TgiJson | TgiRegex | TgiJsonSchema | None = None
    # refused, where they ask for something
    watermark: bool = False
    adapter_id: str | None = None

    @model_validator(mode="after")
    def _possible(self) -> TgiParameters:
        if self.watermark:
            raise ValueError("watermark is not supported: answers here are not marked; leave it out")
        if self.adapter_id:
            raise ValueError("adapter_id is not supported: this server has no adapters; leave it out")
        if (self.best_of or 1) > 1 and not self.samples:
            raise ValueError(
                f"best_of={self.best_of} needs sampling, since greedy answers are all the same: set do_sample=true"
            )
        return self

    @property
    def samples(self) -> bool:
        return self.do_sample or any(
            value not in (None, neutral)
            for value, neutral in (
                (self.temperature, 1.0),
                (self.top_k, None),
                (self.top_p, 1.0),
                (self.typical_p, 1.0),
            )
        )

    def sampling(self, room: int) -> SamplingParams:
        """`room` is how many tokens fit behind the prompt."""
        given: dict[str, Any] = {
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "typical_p": self.typical_p,
            "seed": self.seed,
            "truncate_prompt_tokens": self.truncate,
            "structured_outputs": self._form(),
        }
        values = {name: value for name, value in given.items() if value is not None}
        if self.decoder_input_details:
            values["prompt_logprobs"] = 0
        return SamplingParams(
            n=self.best_of or 1,
            temperature=(self.temperature or 1.0) if self.samples else 0.0,
            max_tokens=self.max_new_tokens or max(1, min(DEFAULT_TOKENS, room)),
            stop=[one for one in self.stop or () if one],
            include_stop_str_in_output=True,
            logprobs=self.top_n_tokens or 0,
            **values,
        )

    def _form(self) -> StructuredOutputsParams | None:
        if self.grammar is None:
            return None
        if isinstance(self.grammar, TgiRegex):
            return StructuredOutputsParams(regex=self.grammar.value)
        schema = self.grammar.value.schema_ if isinstance(self.grammar, TgiJsonSchema) else self.grammar.value
        return StructuredOutputsParams(json=schema, strict=False)


class TgiBody(Body):
    inputs: str
    parameters: TgiParameters = TgiParameters.model_validate({})

    def check_streamable(self) -> None:
        for name, value in (
            ("best_of", (self.parameters.best_of or 1) > 1),
            ("decoder_input_details", self.parameters.decoder_input_details),
        ):
            if value:
                raise ValueError(f"{name} cannot be streamed: leave it out, or use /generate")


class TgiStreamBody(TgiBody):
    @model_validator(mode="after")
    def _streamable(self) -> TgiStreamBody:
        self.check_streamable()
        return self


class TgiEitherBody(TgiBody):
    stream: bool = False

    @model_validator(mode="after")
    def _streamable(self) -> TgiEitherBody:
        if self.stream:
            self.check_streamable()
        return self
