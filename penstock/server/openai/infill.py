"""POST /infill, as in llama-server, and fill-in-the-middle prompts for every API that has them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any, ClassVar

from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.common.fields import MAX_INT32, RequestBody, SamplingBody, make_sampling_params
from penstock.server.common.structured_outputs import StructuredOutputsBody, read_constraint
from penstock.server.generation import Generation
from penstock.server.http import sse
from penstock.server.http.context import (
    cancel_on_disconnect,
    client_of,
    event_stream,
    format_whole,
    json_response,
    read_body,
    server_of,
    start_generation,
)
from penstock.server.http.errors import ApiError
from penstock.server.model import ServedModel
from penstock.server.openai.logprobs import clamp
from penstock.text.infill import Gap, InfillTokens, Room, trim
from penstock.text.prompt_encoder import Encoded
from penstock.types import SamplingParams, StreamDelta, TokenLogprobs

MAX_CONTEXT_TOKENS = 2048  # of the text around the gap, if it is cut
OUTPUT_TOKENS = 256  # reserved for the output if max_tokens is unset
MAX_FILES = 1024
MAX_NAME_CHARS = 4096
SETTINGS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "seed",
    "ignore_eos",
)


def find_infill_tokens(model: ServedModel, param: str) -> InfillTokens:
    """Find the model's fill-in-the-middle tokens; ApiError if it has none."""
    infill_tokens = model.tokenizer.infill if model.tokenizer is not None else None
    if infill_tokens is None:
        raise ApiError(
            400,
            f"{model.name!r} does not support insert: its vocabulary has no fill-in-the-middle tokens; "
            "use a code model that has them (Qwen-Coder, StarCoder, CodeLlama, "
            "DeepSeek-Coder, CodeGemma, Codestral), or leave the text after the gap out",
            param=param,
        )
    return infill_tokens


def make_infill_room(model: ServedModel, num_answer: int | None, num_halves: int | None = None) -> Room:
    """Return the prompt's room beside an output of `num_answer` tokens; `num_halves` bounds the text around the gap."""
    num_tokens = max(1, model.text.intake.longest - (num_answer or min(OUTPUT_TOKENS, model.text.intake.longest // 2)))
    return Room(num_tokens, min(num_tokens, num_halves or num_tokens))


async def encode_infill(
    model: ServedModel, gap: Gap, room: Room | None, *, add_special_tokens: bool = True, tenant: str = ""
) -> Encoded:
    """Encode a gap, cut to `room`; without room a long one is refused."""
    intake = model.text.intake
    if room is not None:
        gap = trim(gap, room)
    else:
        intake.check_length(len(gap.prefix) + len(gap.suffix), cut=False)
    with intake.explain_too_long(False):
        tokens = await model.text.service.encode_infill(
            gap, room, add_special_tokens, None if room else intake.limit(False), tenant
        )
    return intake.wrap_tokens(tokens, gap.prefix)


def stop_at_infill_end(params: SamplingParams, infill_tokens: InfillTokens) -> SamplingParams:
    """Stop at the tokens that end a fill."""
    if params.ignore_eos:
        return params
    return params.clone(stop_token_ids=list(dict.fromkeys([*(params.stop_token_ids or ()), *infill_tokens.ends])))


class InfillFile(RequestBody):
    """Another file, placed before the text."""

    ALLOWS_UNKNOWN: ClassVar[bool] = True  # editors send timestamps and more
    text: str
    filename: str = Field("tmp", max_length=MAX_NAME_CHARS)


class InfillBody(SamplingBody, StructuredOutputsBody):
    """Fields of /infill; `prompt` is what was typed after the prefix."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"n_cache_reuse", "n_keep", "t_max_prompt_ms"})
    input_prefix: str
    input_suffix: str
    input_extra: list[InfillFile] = Field([], max_length=MAX_FILES)
    prompt: str = ""
    n_predict: int | None = Field(None, ge=-2, le=MAX_INT32)  # 0: only compute the prompt
    max_tokens: int | None = Field(None, ge=-2, le=MAX_INT32)
    return_tokens: bool = False

    @field_validator("n")
    @classmethod
    def _check_n(cls, n: int | None) -> int | None:
        if n not in (None, 1):
            raise ValueError(f"n={n} is not supported here: ask {n} times, or /v1/completions with a suffix")
        return n

    @property
    def gap(self) -> Gap:
        return Gap(
            self.input_prefix + self.prompt,
            self.input_suffix,
            tuple((file.filename, file.text) for file in self.input_extra),
        )

    @property
    def max_output(self) -> int | None:
        return None if self.max_tokens is None or self.max_tokens < 0 else max(1, self.max_tokens)


async def infill(request: Request) -> Response:
    body = await read_body(request, InfillBody)
    model = await server_of(request).catalog.open(body.model)
    marks = find_infill_tokens(model, "input_suffix")
    room = make_infill_room(model, body.max_output, MAX_CONTEXT_TOKENS)
    prompt = await cancel_on_disconnect(request, encode_infill(model, body.gap, room, tenant=client_of(request).tenant))
    params = make_sampling_params(
        body,
        model.defaults,
        max_tokens=body.max_output,
        logprobs=body.n_probs or None,
        structured_outputs=read_constraint(body),
    )
    answer = InfillAnswer(
        body, await start_generation(request, model, body, [(prompt, stop_at_infill_end(params, marks))])
    )
    if body.stream:
        return await event_stream(request, answer.events(), lambda error: sse.event(error.body()))
    return json_response(await cancel_on_disconnect(request, answer.collect()))


class InfillAnswer:
    def __init__(self, body: InfillBody, generation: Generation) -> None:
        self._body, self._generation = body, generation
        self._is_silent = body.max_tokens == 0
        self._has_new_line = False

    async def collect(self) -> Any:
        await self._generation.wait()
        prompt = await self._decode_prompt()
        return await format_whole(self._generation, lambda: self._format(prompt))

    def _format(self, prompt: str) -> dict[str, Any]:
        output = self._generation.flights[0].collector.output().outputs[0]
        text = "" if self._is_silent else output.text
        self._has_new_line = "\n" in text
        chunk = {
            **self._format_text(text, list(output.token_ids)),
            **self._format_end(output.finish_reason, output.stop_reason, prompt),
        }
        if self._body.n_probs:
            chunk["completion_probabilities"] = self._format_logprobs(list(output.token_ids), output.logprobs or [])
        return chunk

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._generation.stream()) as items:
            async for _, batch in items:
                for item in batch:
                    yield sse.event(self._format_chunk(item))
                    if item.finish_reason is not None:
                        end = self._format_end(item.finish_reason, item.stop_reason, await self._decode_prompt())
                        yield sse.event({**self._format_text("", []), **end})

    def _format_chunk(self, item: StreamDelta) -> dict[str, Any]:
        text = "" if self._is_silent else item.text
        self._has_new_line = self._has_new_line or "\n" in text
        chunk = {**self._format_text(text, list(item.token_ids)), "stop": False}
        if self._body.n_probs:
            chunk["completion_probabilities"] = self._format_logprobs(list(item.token_ids), list(item.logprobs))
        return chunk

    async def _decode_prompt(self) -> str:
        return await self._generation.model.text.decode(self._generation.flights[0].request.tokens)

    def _format_text(self, text: str, ids: list[int]) -> dict[str, Any]:
        usage = self._generation.usage
        return {
            "index": 0,
            "content": text,
            "tokens": ids if self._body.return_tokens or self._body.stream else [],
            "id_slot": 0,
            "tokens_predicted": 0 if self._is_silent else usage.num_output,
            "tokens_evaluated": usage.num_prompt,
        }

    def _format_end(self, reason: str | None, stop: int | str | None, prompt: str) -> dict[str, Any]:
        generation = self._generation
        sampling, usage = generation.flights[0].request.sampling, generation.usage
        word = stop if isinstance(stop, str) else ""
        settings = {name: getattr(sampling, name) for name in SETTINGS}
        return {
            "stop": True,
            "model": generation.model.name,
            "generation_settings": {
                **settings,
                "n_predict": self._body.max_tokens,
                "stream": self._body.stream,
                "repeat_penalty": sampling.repetition_penalty,
            },
            "prompt": prompt,
            "has_new_line": self._has_new_line,
            "truncated": False,
            "stop_type": "limit" if reason == "length" else "word" if word else "eos",
            "stopping_word": word,
            "tokens_cached": usage.num_prompt + usage.num_output,
            "timings": generation.times.format_timings(usage),
            **usage.energy,
            **generation.relaxed,
            **generation.ledger,
        }

    def _format_logprobs(self, ids: list[int], positions: list[TokenLogprobs]) -> list[dict[str, Any]]:
        return [
            {
                **self._format_token(id, position),
                "top_logprobs": [
                    self._format_token(other, position)
                    for other in sorted(position, key=lambda id: -position[id].logprob)[: self._body.n_probs]
                ],
            }
            for id, position in zip(ids, positions)
        ]

    def _format_token(self, id: int, position: TokenLogprobs) -> dict[str, Any]:
        text = position[id].decoded_token or ""
        return {"id": id, "token": text, "bytes": list(text.encode()), "logprob": clamp(position[id].logprob)}
