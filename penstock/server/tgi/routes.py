"""TGI's API: its bodies, answers and routes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import quote
from penstock.server.catalog import MAX_NAME_CHARS
from penstock.server.common.fields import (
    MAX_INT32,
    MAX_STOPS,
    RequestBody,
    SamplingBody,
    Speculation,
    StopString,
    read_speculation_body,
)
from penstock.server.common.structured_outputs import Source
from penstock.server.generation import Generation
from penstock.server.http.context import (
    Handler,
    cancel_on_disconnect,
    client_of,
    event_stream,
    format_whole,
    json_response,
    read_body,
    run_formatting,
    server_of,
    start_generation,
)
from penstock.server.http.errors import ApiError, format_tgi
from penstock.server.openai.logprobs import clamp
from penstock.types import CompletionOutput, SamplingParams, StreamDelta, StructuredOutputsParams, TokenLogprobs

DEFAULT_TOKENS = 100
MAX_BEST_OF = 16
MAX_TOP_TOKENS = 20


class TgiSchema(RequestBody):
    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class TgiJson(RequestBody):
    type: Literal["json"]
    value: Source | dict[str, Any]


class TgiRegex(RequestBody):
    type: Literal["regex"]
    value: Source


class TgiJsonSchema(RequestBody):
    type: Literal["json_schema"]
    value: TgiSchema


class TgiParameters(RequestBody):
    """Parameters. Decoding is greedy unless do_sample or a sampling parameter is set."""

    best_of: int | None = Field(None, ge=1, le=MAX_BEST_OF)
    temperature: float | None = Field(None, gt=0, le=100)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    top_k: int | None = Field(None, ge=1, le=MAX_INT32)
    top_p: float | None = Field(None, gt=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    do_sample: bool = False
    max_new_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    return_full_text: bool | None = None
    stop: list[StopString] | None = Field(None, max_length=MAX_STOPS)
    truncate: int | None = Field(None, ge=1, le=MAX_INT32)
    details: bool = False
    decoder_input_details: bool = False
    seed: int | None = Field(None, ge=0, lt=2**64)
    top_n_tokens: int | None = Field(None, ge=0, le=MAX_TOP_TOKENS)
    grammar: TgiJson | TgiRegex | TgiJsonSchema | None = None
    # Penstock's
    speculation: Speculation = None
    include_applied: bool = False
    adapter_id: str | None = Field(None, max_length=MAX_NAME_CHARS)
    # refused if set
    watermark: bool = False

    @model_validator(mode="after")
    def _check_fields(self) -> TgiParameters:
        if self.watermark:
            raise ValueError("watermark is not supported: leave it out")
        if (self.best_of or 1) > 1 and not self.is_sampled:
            raise ValueError(f"best_of={self.best_of} needs sampling, greedy outputs are all equal: set do_sample=true")
        return self

    @property
    def is_sampled(self) -> bool:
        return self.do_sample or any(
            value not in (None, neutral)
            for value, neutral in (
                (self.temperature, 1.0),
                (self.top_k, None),
                (self.top_p, 1.0),
                (self.typical_p, 1.0),
            )
        )

    def to_sampling(self, room: int) -> SamplingParams:
        """Convert to sampling parameters; `room` is the number of tokens left after the prompt."""
        given: dict[str, Any] = {
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "typical_p": self.typical_p,
            "seed": self.seed,
            "truncate_prompt_tokens": self.truncate,
            "structured_outputs": self._make_constraint(),
            "speculation": read_speculation_body(self.speculation),
        }
        values = {name: value for name, value in given.items() if value is not None}
        if self.decoder_input_details:
            values["prompt_logprobs"] = 0
        return SamplingParams(
            n=self.best_of or 1,
            temperature=(self.temperature or 1.0) if self.is_sampled else 0.0,
            max_tokens=self.max_new_tokens or max(1, min(DEFAULT_TOKENS, room)),
            stop=[one for one in self.stop or () if one],
            include_stop_str_in_output=True,
            logprobs=self.top_n_tokens or 0,
            **values,
        )

    def _make_constraint(self) -> StructuredOutputsParams | None:
        if self.grammar is None:
            return None
        if isinstance(self.grammar, TgiRegex):
            return StructuredOutputsParams(regex=self.grammar.value)
        schema = self.grammar.value.schema_ if isinstance(self.grammar, TgiJsonSchema) else self.grammar.value
        return StructuredOutputsParams(json=schema, strict=False)


class TgiBody(RequestBody):
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
    def _check_stream(self) -> TgiStreamBody:
        self.check_streamable()
        return self


class TgiEitherBody(TgiBody):
    stream: bool = False

    @model_validator(mode="after")
    def _check_stream(self) -> TgiEitherBody:
        if self.stream:
            self.check_streamable()
        return self


def encode_event(value: Any) -> bytes:
    return b"data:" + msgspec.json.encode(value) + b"\n\n"


def encode_failure(error: ApiError) -> bytes:
    return encode_event(format_tgi(error)[1])


class TgiAnswer:
    def __init__(self, body: TgiBody, generation: Generation) -> None:
        self._body, self._parameters = body, body.parameters
        self._generation = generation
        self._flight = generation.flights[0]
        self._num_tokens = 0
        self._texts: list[str] = []

    async def collect(self) -> Any:
        await self._generation.wait()
        return await format_whole(self._generation, self._format)

    def _format(self) -> dict[str, Any]:
        output = self._flight.collector.output()
        best, *others = sorted(output.outputs, key=lambda one: one.cumulative_logprob or 0.0, reverse=True)
        answer: dict[str, Any] = {
            "generated_text": self._add_prompt(best.text),
            **self._generation.relaxed,
            **self._generation.ledger,
        }
        if self._parameters.details or self._parameters.decoder_input_details:
            details = self._format_details(best)
            details["prefill"] = self._format_prefill(output.prompt_logprobs or ())
            details |= self._generation.usage.energy
            if others:
                details["best_of_sequences"] = [
                    {"generated_text": self._add_prompt(one.text), "prefill": [], **self._format_details(one)}
                    for one in others
                ]
            answer["details"] = details
        return answer

    def _add_prompt(self, text: str) -> str:
        return self._body.inputs + text if self._parameters.return_full_text else text

    def _format_details(self, output: CompletionOutput) -> dict[str, Any]:
        positions = output.logprobs or []
        details = {
            "finish_reason": finish_reason(output.finish_reason, output.stop_reason),
            "generated_tokens": len(output.token_ids),
            "seed": self._find_seed(),
            "prefill": [],
            "tokens": [self._format_token(id, position) for id, position in zip(output.token_ids, positions)],
        }
        if self._parameters.top_n_tokens:
            details["top_tokens"] = [self._format_top(position) for position in positions]
        return details

    def _format_prefill(self, positions: Sequence[TokenLogprobs | None]) -> list[dict[str, Any]]:
        """Format the prompt's tokens; the first has no logprob."""
        entries = []
        for id, position in zip(self._flight.request.tokens, positions):
            logprob = clamp(position[id].logprob) if position else None
            entries.append({"id": id, "text": self._decode(id), "logprob": logprob})
        return entries

    def _find_seed(self) -> int | None:
        return self._flight.request.seed if self._parameters.is_sampled else None

    def _decode(self, id: int) -> str:
        tokenizer = self._generation.model.tokenizer
        return tokenizer.token_text(id) if tokenizer else ""

    def _format_token(self, id: int, position: TokenLogprobs) -> dict[str, Any]:
        tokenizer = self._generation.model.tokenizer
        return {
            "id": id,
            "text": self._decode(id),
            "logprob": clamp(position[id].logprob) if id in position else 0.0,
            "special": tokenizer is not None and id in tokenizer.special_ids,
        }

    def _format_top(self, position: TokenLogprobs) -> list[dict[str, Any]]:
        ranked = sorted(position, key=lambda id: -position[id].logprob)[: self._parameters.top_n_tokens]
        return [self._format_token(id, position) for id in ranked]

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._generation.stream()) as items:
            async for _, batch in items:
                events = await run_formatting(
                    self._generation.count_logprobs(batch), partial(self._encode_batch, batch)
                )
                if events:
                    yield events

    def _encode_batch(self, batch: list[StreamDelta]) -> bytes:
        return b"".join([one for item in batch for one in self._encode_delta(item)])

    def _encode_delta(self, item: StreamDelta) -> list[bytes]:
        """Encode one event per token. Text of several tokens goes to the last that is not special; special tokens show
        their own text."""
        self._texts.append(item.text)
        ids = list(zip(item.token_ids, item.logprobs))
        tokens = [self._format_token(id, position) for id, position in ids]
        plain = [token for token in tokens if not token["special"]] or (tokens[-1:] if item.text else [])
        for token in plain:
            token["text"] = item.text if token is plain[-1] else ""
        events: list[dict[str, Any]] = []
        for token, (_, position) in zip(tokens, ids):
            self._num_tokens += 1
            events.append({"index": self._num_tokens, "token": token, "generated_text": None, "details": None})
            if self._parameters.top_n_tokens:
                events[-1]["top_tokens"] = self._format_top(position)
        if item.finish_reason is not None and events:
            events[-1] |= {**self._format_end(item), **self._generation.relaxed, **self._generation.ledger}
        return [encode_event(one) for one in events]

    def _format_end(self, item: StreamDelta) -> dict[str, Any]:
        return {
            "generated_text": self._add_prompt("".join(self._texts)),
            "details": {
                "finish_reason": finish_reason(item.finish_reason, item.stop_reason),
                "generated_tokens": self._num_tokens,
                "seed": self._find_seed(),
                "input_length": len(self._flight.request.tokens),
                **self._generation.usage.energy,
            },
        }


def finish_reason(reason: str | None, stop: int | str | None) -> str:
    if reason == "length":
        return "length"
    return "stop_sequence" if isinstance(stop, str) else "eos_token"


async def answer_whole(request: Request, body: TgiBody) -> Response:
    """Answer a body of /generate."""
    answer = await _start(request, body)
    return json_response(await cancel_on_disconnect(request, answer.collect()))


async def generate_stream(request: Request) -> Response:
    answer = await _start(request, await read_body(request, TgiStreamBody))
    return await event_stream(request, answer.events(), encode_failure)


async def generate_either(request: Request) -> Response:
    body = await read_body(request, TgiEitherBody)
    answer = await _start(request, body)
    if body.stream:
        return await event_stream(request, answer.events(), encode_failure)
    return json_response([await cancel_on_disconnect(request, answer.collect())])


async def _start(request: Request, body: TgiBody) -> TgiAnswer:
    """Start on the default model, or on an adapter's: TGI's bodies name no model."""
    server, parameters = server_of(request), body.parameters
    base = server.catalog.find_base(parameters.adapter_id)
    if parameters.adapter_id and base is None:
        known = ", ".join(name for one in server.catalog for name in one.loras.list_names()) or "none"
        raise ApiError(400, f"there is no adapter {quote(parameters.adapter_id)}: the adapters are {known}")
    model = await server.catalog.open(parameters.adapter_id or None)
    encoded = await cancel_on_disconnect(
        request, model.text.encode(body.inputs, cut=parameters.truncate is not None, tenant=client_of(request).tenant)
    )
    num_prompt = min(len(encoded.tokens), parameters.truncate or len(encoded.tokens))
    params = parameters.to_sampling(model.text.intake.longest - num_prompt)
    asked = SamplingBody.model_validate({"model": parameters.adapter_id})
    generation = await start_generation(request, model, asked, [(encoded, params)])
    generation.includes_applied = parameters.include_applied
    return TgiAnswer(body, generation)


TAG = "TGI"
WRITES: list[tuple[str, Handler, type[BaseModel] | None, str]] = [
    ("/generate_stream", generate_stream, TgiStreamBody, TAG),
    ("/", generate_either, TgiEitherBody, TAG),
]
