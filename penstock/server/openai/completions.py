"""POST /v1/completions: its body and answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.common.beams import BeamBody, find_beams
from penstock.server.common.defaults import take_defaults
from penstock.server.common.fields import MAX_INT32, MAX_TOP_LOGPROBS, SamplingBody, make_sampling_params
from penstock.server.common.structured_outputs import StructuredOutputsBody, read_constraint
from penstock.server.engines.direct import OpenBody, join_deltas
from penstock.server.generation import Generation
from penstock.server.http import sse
from penstock.server.http.context import (
    cancel_on_disconnect,
    client_of,
    event_stream,
    format_whole,
    json_response,
    new_id,
    now,
    read_body,
    run_formatting,
    server_of,
    start_generation,
)
from penstock.server.http.errors import warn
from penstock.server.model import ServedModel
from penstock.server.openai.infill import encode_infill, find_infill_tokens, stop_at_infill_end
from penstock.server.openai.logprobs import (
    add_token_texts,
    count_top,
    format_completion_logprobs,
    format_prompt_logprobs,
    name_token,
)
from penstock.text.chat.reasoning import detect_kind, prompt_block
from penstock.text.infill import Gap, Room
from penstock.text.prompt_encoder import Encoded
from penstock.types import CompletionOutput, SamplingParams, StreamDelta, TokenLogprobs

MAX_PROMPTS = 2048
MAX_SUFFIX_PROMPTS = 64  # the suffix is encoded once per prompt
DEFAULT_TOKENS = 16
Kind = TypeVar("Kind")
Several = Annotated[list[Kind], Field(max_length=MAX_PROMPTS)]


class CompletionBody(SamplingBody, StructuredOutputsBody, BeamBody):
    prompt: str | list[int] | Several[str] | Several[list[int]]
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    max_tokens: int | None = Field(DEFAULT_TOKENS, ge=-2, le=MAX_INT32)  # negative: as many as fit
    suffix: str | None = None
    add_special_tokens: bool = True
    thinking_token_budget: int | None = Field(None, ge=-1, le=MAX_INT32)

    @model_validator(mode="after")
    def _check_fields(self) -> CompletionBody:
        if self.n_probs and self.logprobs is None:
            self.logprobs = self.n_probs
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompts()):
            raise ValueError("suffix needs a text prompt: token ids cannot be infilled")
        if self.suffix and len(self.prompts()) > MAX_SUFFIX_PROMPTS:
            raise ValueError(
                f"{len(self.prompts())} prompts with a suffix: the limit is {MAX_SUFFIX_PROMPTS}; send fewer"
            )
        if self.suffix and self.echo:
            raise ValueError("echo is not supported with a suffix: leave one of them out")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise ValueError(
                f"best_of={self.best_of} over n={self.n or 1} cannot be streamed: the best are known only at the end"
            )
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError(f"best_of={self.best_of} is below n={self.n}")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 gives nothing without echo=true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        if isinstance(self.prompt, list) and len(self.prompt) == 0:
            raise ValueError("the prompt is empty: give a text or a list of token ids")
        return self

    def prompts(self) -> list[str | list[int]]:
        """List the prompts; a list of numbers is one prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


async def completions(request: Request) -> Response:
    body = await read_body(request, CompletionBody)
    server = server_of(request)
    take_defaults(body, server.config)
    model = await server.catalog.open(body.model)
    params, tenant = _make_params(body, model), client_of(request).tenant
    if body.suffix:
        params = stop_at_infill_end(params, find_infill_tokens(model, "suffix"))
        prompts = await cancel_on_disconnect(request, _encode_infills(body, model, tenant))
    else:
        cut = body.truncate_prompt_tokens is not None
        asked = body.prompts()
        work = model.text.encode_all(asked, cut=cut, tenant=tenant, add_special_tokens=body.add_special_tokens)
        has_text = any(isinstance(one, str) for one in asked)
        prompts = await (cancel_on_disconnect(request, work) if has_text else work)
    if params.thinking_token_budget is not None:
        prompts = await _find_reasoning(request, model, params, prompts)
    asked_of = [(one, find_beams(body, params, len(one.tokens), model.text.intake)) for one in prompts]
    generation = await start_generation(request, model, body, asked_of)
    answer = CompletionAnswer(body, prompts, generation)
    server.traces.name(generation.trace, str(answer.head["id"]))
    if body.stream:
        return await event_stream(request, answer.events(), begin=answer.write_to)
    return json_response(await cancel_on_disconnect(request, answer.collect()))


async def _find_reasoning(
    request: Request, model: ServedModel, params: SamplingParams, prompts: list[Encoded]
) -> list[Encoded]:
    """Add to each prompt the reasoning block that its output may begin with, for the thinking budget."""
    tokenizer = model.tokenizer
    kind = (model.reasoning_parser or detect_kind(tokenizer.chat_template)) if tokenizer else None
    if tokenizer is None or kind is None:
        warn(
            request,
            f"a budget of {params.thinking_token_budget} tokens for thinking has no effect: the model marks "
            "no reasoning",
        )
        return prompts

    return await asyncio.to_thread(
        lambda: [replace(one, reasoning=prompt_block(kind, tokenizer, one.tokens, one.prompt)) for one in prompts]
    )


async def _encode_infills(body: CompletionBody, model: ServedModel, tenant: str) -> list[Encoded]:
    """Encode prompts with a suffix; a truncated one keeps the text next to the gap."""
    max_tokens = body.truncate_prompt_tokens
    room = None if max_tokens is None else Room(max_tokens, max_tokens)
    return [
        await encode_infill(
            model, Gap(str(prompt), body.suffix or ""), room, tenant=tenant, add_special_tokens=body.add_special_tokens
        )
        for prompt in body.prompts()
    ]


def _make_params(body: CompletionBody, model: ServedModel) -> SamplingParams:
    more: dict[str, Any] = {
        "best_of": body.best_of,
        "structured_outputs": read_constraint(body),
        "thinking_token_budget": body.thinking_token_budget,
    }
    if body.echo and body.logprobs is not None:
        more["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    max_tokens = 1 if body.max_tokens == 0 else body.max_tokens
    return make_sampling_params(body, model.defaults, max_tokens=max_tokens, logprobs=body.logprobs, **more)


class CompletionAnswer:
    def __init__(self, body: CompletionBody, prompts: list[Encoded], generation: Generation) -> None:
        self.body, self.prompts, self.generation = body, prompts, generation
        self.head = {
            "id": body.request_id or new_id("cmpl-"),
            "object": "text_completion",
            "created": now(),
            "model": body.model or generation.model.name,
            "system_fingerprint": generation.model.fingerprint,
        }
        self.num_each = body.n or 1
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
        # But for the first and the last of a choice, a chunk is its text and what all chunks share.
        self._is_plain = (
            body.logprobs is None
            and body.max_tokens != 0
            and not body.return_token_ids
            and not (body.stream_options is not None and body.stream_options.continuous_usage_stats)
        )
        self._templates: dict[tuple[int, int], sse.EventTemplate] = {}
        self._num_open = self.num_each * len(prompts)  # choices of a stream
        self._begun: dict[tuple[int, int], int] = {}  # characters sent so far
        self._num_sent = 0  # tokens of the chunks so far, where each chunk tells the usage

    async def collect(self) -> Any:
        await self.generation.wait()
        return await format_whole(self.generation, self._format)

    def _format(self) -> dict[str, Any]:
        choices = []
        for number, flight in enumerate(self.generation.flights):
            output = flight.collector.output()
            self._prompt_logprobs[number] = add_token_texts(
                output.prompt_logprobs or [], self.generation.model.tokenizer
            )
            for one in output.outputs:
                choice = self._format_choice(number, one, first=True)
                choices.append({"prompt_logprobs": None, "prompt_token_ids": None, "token_ids": None, **choice})
        usage = self.generation.usage
        return {
            **self.head,
            "choices": choices,
            "usage": usage.to_openai(),
            "timings": self.generation.times.format_timings(usage),
            **self.generation.relaxed,
            **self.generation.ledger,
        }

    def _format_choice(
        self, number: int, output: CompletionOutput | StreamDelta, *, first: bool, offset: int = 0
    ) -> dict[str, Any]:
        body, text, token_ids, finish_reason = self.body, output.text, list(output.token_ids), output.finish_reason
        logprobs = list(output.logprobs or ())
        if body.max_tokens == 0:
            text, token_ids, logprobs, finish_reason = "", [], [], finish_reason and "length"
        choice: dict[str, Any] = {
            "index": number * self.num_each + output.index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": output.stop_reason,
        }
        echoes = bool(body.echo) and first
        choice["text"] = self._find_prompt_text(number) + text if echoes else text
        if body.logprobs is not None:
            positions: list[TokenLogprobs | None] = [*logprobs]
            ids = token_ids
            if echoes:
                positions = [*self._prompt_logprobs.get(number, []), *positions]
                ids = [*self._find_tokens(number), *ids]
            names = self._name_each(ids)
            num_top, as_ids = count_top(body, body.logprobs), body.return_tokens_as_token_ids
            choice["logprobs"] = format_completion_logprobs(positions, names, num_top, offset, as_ids)
        if body.prompt_logprobs is not None and first:
            choice["prompt_logprobs"] = format_prompt_logprobs(self._prompt_logprobs.get(number, []))
        if body.return_token_ids:
            choice["token_ids"] = token_ids
            if first:
                choice["prompt_token_ids"] = list(self._find_tokens(number))
        if output.forced_closing:
            choice["forced_closing"] = True
        return choice

    def _find_tokens(self, number: int) -> Sequence[int]:
        """Return a prompt's tokens as the model read them: a truncated prompt keeps its end."""
        return self.generation.flights[number].request.tokens

    def _find_prompt_text(self, number: int) -> str:
        prompt, tokens = self.prompts[number], self._find_tokens(number)
        if prompt.prompt is not None and len(tokens) == len(prompt.tokens):
            return prompt.prompt
        tokenizer = self.generation.model.tokenizer
        return tokenizer.decode(list(tokens), skip_special_tokens=False) if tokenizer else ""

    def _name_each(self, ids: list[int]) -> list[str]:
        tokenizer = None if self.body.return_tokens_as_token_ids else self.generation.model.tokenizer
        return [tokenizer.token_text(id) if tokenizer else name_token(id) for id in ids]

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self.generation.stream()) as items:
            async for number, batch in items:
                num_first = sum((number, item.index) not in self._begun for item in batch)
                yield await run_formatting(
                    self.generation.count_logprobs(batch, num_first), partial(self._encode_batch, number, batch)
                )
        options = self.body.stream_options
        usage = self.generation.usage
        if options is not None and options.include_usage:
            yield sse.event(
                {
                    **self.head,
                    "choices": [],
                    "usage": usage.to_openai(),
                    "timings": self.generation.times.format_timings(usage),
                }
            )
        yield sse.DONE

    def write_to(self, body: OpenBody) -> None:
        self.generation.write_to(body, self._encode_directly)

    def _encode_directly(self, batch: list[StreamDelta], join: bool) -> bytes:
        """Encode what comes between the first and the last delta of a choice."""
        if join:
            batch = join_deltas(batch)
        template = self._templates.get((0, batch[0].index))
        if template is not None and len(batch) == 1:
            return template.fill(batch[0].text)
        return self._encode_batch(0, batch)

    def _find_template(self, number: int, index: int) -> sse.EventTemplate:
        template = self._templates.get((number, index))
        if template is None:
            item = StreamDelta("", index, sse.TEXT, ())
            template = self._templates[number, index] = sse.EventTemplate(self._make_chunk(number, item, first=False))
        return template

    def _make_chunk(self, number: int, item: StreamDelta, *, first: bool, offset: int = 0) -> dict[str, Any]:
        choice = self._format_choice(number, item, first=first, offset=offset)
        chunk = {**self.head, "choices": [choice], **(self.generation.relaxed if item.finish_reason else {})}
        self._num_open -= item.finish_reason is not None
        chunk |= {} if self._num_open else self.generation.ledger
        options = self.body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = None
            if options.continuous_usage_stats:
                self._num_sent += len(item.token_ids)
                usage = self.generation.usage
                chunk["usage"] = {**usage.to_openai(), **usage.count(self._num_sent)}
        return chunk

    def _encode_batch(self, number: int, batch: list[StreamDelta]) -> bytes:
        return b"".join([self._encode_chunk(number, item) for item in batch])

    def _encode_chunk(self, number: int, item: StreamDelta) -> bytes:
        key, begun = (number, item.index), self._begun
        first = key not in begun
        if not first and self._is_plain and item.finish_reason is None and not item.forced_closing:
            begun[key] += len(item.text)
            return self._find_template(number, item.index).fill(item.text)
        if item.prompt_logprobs is not None:
            self._prompt_logprobs[number] = add_token_texts(item.prompt_logprobs, self.generation.model.tokenizer)
        chunk = self._make_chunk(number, item, first=first, offset=begun.get(key, 0))
        begun[key] = begun.get(key, 0) + len(chunk["choices"][0]["text"])
        return sse.event(chunk)
