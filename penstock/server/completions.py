"""/v1/completions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.intake import Encoded
from penstock.server import sse
from penstock.server.completion_body import CompletionBody
from penstock.server.context import (
    begin,
    client_of,
    event_stream,
    json_response,
    new_id,
    now,
    read,
    server_of,
    shaped,
    shaped_whole,
    unless_gone,
)
from penstock.server.fields import sampling_params
from penstock.server.gaps import encode_gap, end_with_gap, find_marks
from penstock.server.generation import Generation
from penstock.server.logprobs import completion_logprobs, named, prompt_logprobs
from penstock.server.model import ServedModel
from penstock.server.notices import warn
from penstock.server.structure import structure
from penstock.text.infill import Gap, Room
from penstock.text.reasoning import detect_kind, prompt_block
from penstock.types import SamplingParams, StreamDelta, TokenLogprobs


async def completions(request: Request) -> Response:
    body = await read(request, CompletionBody)
    server = server_of(request)
    model = await server.catalog.open(body.model)
    params, tenant = _params(body, model), client_of(request).tenant
    if body.suffix:
        params = end_with_gap(params, find_marks(model, "suffix"))
        prompts = await unless_gone(request, _encode_gaps(body, model, tenant))
    else:
        cut = body.truncate_prompt_tokens is not None
        prompts = await unless_gone(
            request,
            model.encode_all(body.prompts(), cut=cut, tenant=tenant, add_special_tokens=body.add_special_tokens),
        )
    if params.thinking_token_budget is not None:
        prompts = await _find_reasoning(request, model, params, prompts)
    generation = await begin(request, model, body, [(encoded, params) for encoded in prompts])
    answer = CompletionAnswer(body, prompts, generation)
    if body.stream:
        return await event_stream(request, answer.events())
    return json_response(await unless_gone(request, answer.whole()))


async def _find_reasoning(
    request: Request, model: ServedModel, params: SamplingParams, prompts: list[Encoded]
) -> list[Encoded]:
    """With the reasoning that their answers may begin with, which has a budget."""
    tokenizer = model.tokenizer
    kind = (model.reasoning_parser or detect_kind(tokenizer.chat_template)) if tokenizer else None
    if tokenizer is None or kind is None:
        warn(
            request,
            f"a budget of {params.thinking_token_budget} tokens for thinking has no effect: the model marks "
            "no reasoning",
        )
        return prompts

    def find() -> list[Encoded]:
        return [replace(one, reasoning=prompt_block(kind, tokenizer, one.tokens, one.prompt)) for one in prompts]

    return await asyncio.to_thread(find)


async def _encode_gaps(body: CompletionBody, model: ServedModel, tenant: str) -> list[Encoded]:
    """A cut prompt has the text that is nearest to the gap."""
    most = body.truncate_prompt_tokens
    room = None if most is None else Room(most, most)
    return [
        await encode_gap(
            model, Gap(str(prompt), body.suffix or ""), room, tenant=tenant, add_special_tokens=body.add_special_tokens
        )
        for prompt in body.prompts()
    ]


def _params(body: CompletionBody, model: ServedModel) -> SamplingParams:
    more: dict[str, Any] = {
        "best_of": body.best_of,
        "structured_outputs": structure(body),
        "thinking_token_budget": body.thinking_token_budget,
    }
    if body.echo and body.logprobs is not None:
        more["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    longest = 1 if body.max_tokens == 0 else body.max_tokens
    return sampling_params(body, model.defaults, max_tokens=longest, logprobs=body.logprobs, **more)


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

    # whole

    async def whole(self) -> Any:
        async with contextlib.aclosing(self.generation.stream()) as items:
            async for _ in items:
                pass
        return await shaped_whole(self.generation, self._whole)

    def _whole(self) -> dict[str, Any]:
        choices = []
        for number, flight in enumerate(self.generation.flights):
            output = flight.collector.output()
            self._prompt_logprobs[number] = named(output.prompt_logprobs or [], self.generation.model.tokenizer)
            for one in output.outputs:
                choice = self._choice(
                    number,
                    one.index,
                    one.text,
                    one.token_ids,
                    one.logprobs or [],
                    one.finish_reason,
                    one.stop_reason,
                    first=True,
                )
                if one.forced_closing:
                    choice["forced_closing"] = True
                choices.append({"prompt_logprobs": None, "prompt_token_ids": None, "token_ids": None, **choice})
        usage = self.generation.usage
        return {
            **self.head,
            "choices": choices,
            "usage": usage.openai(),
            "timings": self.generation.times.timings(usage),
            **self.generation.relaxed,
        }

    def _choice(
        self,
        number: int,
        sibling: int,
        text: str,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        finish_reason: str | None,
        stop_reason: int | str | None,
        *,
        first: bool,
        offset: int = 0,
    ) -> dict[str, Any]:
        body = self.body
        if body.max_tokens == 0:
            text, token_ids, logprobs, finish_reason = "", [], [], finish_reason and "length"
        choice: dict[str, Any] = {
            "index": number * self.num_each + sibling,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
        echoed = self._prompt_text(number) if body.echo and first else ""
        choice["text"] = echoed + text
        if body.logprobs is not None:
            positions: list[TokenLogprobs | None] = list(logprobs)
            ids = list(token_ids)
            if echoed:
                positions = [*self._prompt_logprobs.get(number, []), *positions]
                ids = [*self._tokens(number), *ids]
            choice["logprobs"] = completion_logprobs(positions, self._texts(ids), body.logprobs, offset)
        if body.prompt_logprobs is not None and first:
            choice["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs.get(number, []))
        if body.return_token_ids:
            choice["token_ids"] = list(token_ids)
            if first:
                choice["prompt_token_ids"] = list(self._tokens(number))
        return choice

    def _tokens(self, number: int) -> Sequence[int]:
        """A prompt's as the model read them: one that may be cut keeps its end."""
        return self.generation.flights[number].request.tokens

    def _prompt_text(self, number: int) -> str:
        prompt, tokens = self.prompts[number], self._tokens(number)
        if prompt.prompt is not None and len(tokens) == len(prompt.tokens):
            return prompt.prompt
        tokenizer = self.generation.model.tokenizer
        return tokenizer.decode(list(tokens)) if tokenizer else ""

    def _texts(self, ids: list[int]) -> list[str]:
        tokenizer = self.generation.model.tokenizer
        return [tokenizer.token_text(id) if tokenizer else f"token_id:{id}" for id in ids]

    # streamed

    async def events(self) -> AsyncGenerator[bytes, None]:
        begun: dict[tuple[int, int], int] = {}  # characters so far
        async with contextlib.aclosing(self.generation.stream()) as items:
            async for number, batch in items:
                num_first = sum((number, item.index) not in begun for item in batch)
                yield await shaped(
                    self.generation.num_in(batch, num_first), partial(self._chunks, number, batch, begun)
                )
        options = self.body.stream_options
        usage = self.generation.usage
        if options is not None and options.include_usage:
            yield sse.event(
                {**self.head, "choices": [], "usage": usage.openai(), "timings": self.generation.times.timings(usage)}
            )
        yield sse.DONE

    def _chunks(self, number: int, batch: list[StreamDelta], begun: dict[tuple[int, int], int]) -> bytes:
        return b"".join([self._chunk(number, item, begun) for item in batch])

    def _chunk(self, number: int, item: StreamDelta, begun: dict[tuple[int, int], int]) -> bytes:
        key = number, item.index
        first = key not in begun
        if item.prompt_logprobs is not None:
            self._prompt_logprobs[number] = named(item.prompt_logprobs, self.generation.model.tokenizer)
        choice = self._choice(
            number,
            item.index,
            item.text,
            list(item.token_ids),
            list(item.logprobs),
            item.finish_reason,
            item.stop_reason,
            first=first,
            offset=begun.get(key, 0),
        )
        begun[key] = begun.get(key, 0) + len(choice["text"])
        if item.forced_closing:
            choice["forced_closing"] = True
        chunk = {**self.head, "choices": [choice], **(self.generation.relaxed if item.finish_reason else {})}
        options = self.body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = self.generation.usage.openai() if options.continuous_usage_stats else None
        return sse.event(chunk)
