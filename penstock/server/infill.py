"""/infill, as llama-server has it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.server import sse
from penstock.server.context import (
    begin,
    client_of,
    event_stream,
    json_response,
    read,
    server_of,
    shaped_whole,
    unless_gone,
)
from penstock.server.fields import sampling_params
from penstock.server.gaps import HALVES_TOKENS, encode_gap, end_with_gap, find_marks, room_for
from penstock.server.generation import Generation
from penstock.server.infill_body import InfillBody
from penstock.server.logprobs import finite
from penstock.server.structure import structure
from penstock.types import StreamDelta, TokenLogprobs

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


async def infill(request: Request) -> Response:
    body = await read(request, InfillBody)
    model = await server_of(request).catalog.open(body.model)
    marks = find_marks(model, "input_suffix")
    room = room_for(model, body.num_answer, HALVES_TOKENS)
    prompt = await unless_gone(request, encode_gap(model, body.gap, room, tenant=client_of(request).tenant))
    params = sampling_params(
        body,
        model.defaults,
        max_tokens=body.num_answer,
        logprobs=body.n_probs or None,
        structured_outputs=structure(body),
    )
    answer = InfillAnswer(body, await begin(request, model, body, [(prompt, end_with_gap(params, marks))]))
    if body.stream:
        return await event_stream(request, answer.events(), lambda error: sse.event(error.body()))
    return json_response(await unless_gone(request, answer.whole()))


class InfillAnswer:
    def __init__(self, body: InfillBody, generation: Generation) -> None:
        self._body, self._generation = body, generation
        self._is_silent = body.max_tokens == 0
        self._has_new_line = False

    async def whole(self) -> Any:
        async with contextlib.aclosing(self._generation.stream()) as items:
            async for _ in items:
                pass
        prompt = await self._prompt()
        return await shaped_whole(self._generation, lambda: self._whole(prompt))

    def _whole(self, prompt: str) -> dict[str, Any]:
        output = self._generation.flights[0].collector.output().outputs[0]
        text = "" if self._is_silent else output.text
        self._has_new_line = "\n" in text
        told = {
            **self._said(text, list(output.token_ids)),
            **self._end(output.finish_reason, output.stop_reason, prompt),
        }
        if self._body.n_probs:
            told["completion_probabilities"] = self._probabilities(list(output.token_ids), output.logprobs or [])
        return told

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._generation.stream()) as items:
            async for _, batch in items:
                for item in batch:
                    yield sse.event(self._chunk(item))
                    if item.finish_reason is not None:
                        end = self._end(item.finish_reason, item.stop_reason, await self._prompt())
                        yield sse.event({**self._said("", []), **end})

    def _chunk(self, item: StreamDelta) -> dict[str, Any]:
        text = "" if self._is_silent else item.text
        self._has_new_line = self._has_new_line or "\n" in text
        told = {**self._said(text, list(item.token_ids)), "stop": False}
        if self._body.n_probs:
            told["completion_probabilities"] = self._probabilities(list(item.token_ids), list(item.logprobs))
        return told

    async def _prompt(self) -> str:
        return await self._generation.model.decode(self._generation.flights[0].request.tokens)

    def _said(self, text: str, ids: list[int]) -> dict[str, Any]:
        usage = self._generation.usage
        return {
            "index": 0,
            "content": text,
            "tokens": ids if self._body.return_tokens or self._body.stream else [],
            "id_slot": 0,
            "tokens_predicted": 0 if self._is_silent else usage.num_output,
            "tokens_evaluated": usage.num_prompt,
        }

    def _end(self, reason: str | None, stop: int | str | None, prompt: str) -> dict[str, Any]:
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
            "timings": generation.times.timings(usage),
            **generation.relaxed,
        }

    def _probabilities(self, ids: list[int], positions: list[TokenLogprobs]) -> list[dict[str, Any]]:
        return [
            {
                **self._token(id, position),
                "top_logprobs": [
                    self._token(other, position)
                    for other in sorted(position, key=lambda id: -position[id].logprob)[: self._body.n_probs]
                ],
            }
            for id, position in zip(ids, positions)
        ]

    def _token(self, id: int, position: TokenLogprobs) -> dict[str, Any]:
        text = position[id].decoded_token or ""
        return {"id": id, "token": text, "bytes": list(text.encode()), "logprob": finite(position[id].logprob)}
