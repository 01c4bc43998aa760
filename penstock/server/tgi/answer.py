"""Answers in TGI's shapes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

import msgspec

from penstock.server.context import shaped, shaped_whole
from penstock.server.errors import ApiError, tgi_shape
from penstock.server.generation import Generation
from penstock.server.logprobs import finite
from penstock.server.tgi.bodies import TgiBody
from penstock.types import CompletionOutput, StreamDelta, TokenLogprobs


def event(value: Any) -> bytes:
    return b"data:" + msgspec.json.encode(value) + b"\n\n"


def failed(error: ApiError) -> bytes:
    return event(tgi_shape(error)[1])


class TgiAnswer:
    def __init__(self, body: TgiBody, generation: Generation) -> None:
        self._body, self._parameters = body, body.parameters
        self._generation = generation
        self._flight = generation.flights[0]
        self._num_tokens = 0
        self._texts: list[str] = []

    # whole

    async def whole(self) -> Any:
        async with contextlib.aclosing(self._generation.stream()) as items:
            async for _ in items:
                pass
        return await shaped_whole(self._generation, self._whole)

    def _whole(self) -> dict[str, Any]:
        output = self._flight.collector.output()
        best, *others = sorted(output.outputs, key=_score, reverse=True)
        answer: dict[str, Any] = {"generated_text": self._full(best.text), **self._generation.relaxed}
        if self._parameters.details or self._parameters.decoder_input_details:
            details = self._details(best)
            details["prefill"] = self._prefill(output.prompt_logprobs or ())
            if others:
                details["best_of_sequences"] = [
                    {"generated_text": self._full(one.text), "prefill": [], **self._details(one)} for one in others
                ]
            answer["details"] = details
        return answer

    def _full(self, text: str) -> str:
        return self._body.inputs + text if self._parameters.return_full_text else text

    def _details(self, output: CompletionOutput) -> dict[str, Any]:
        positions = output.logprobs or []
        details = {
            "finish_reason": finish_reason(output.finish_reason, output.stop_reason),
            "generated_tokens": len(output.token_ids),
            "seed": self._seed(),
            "prefill": [],
            "tokens": [self._token(id, position) for id, position in zip(output.token_ids, positions)],
        }
        if self._parameters.top_n_tokens:
            details["top_tokens"] = [self._top(position) for position in positions]
        return details

    def _prefill(self, positions: Sequence[TokenLogprobs | None]) -> list[dict[str, Any]]:
        """The prompt's tokens; the first has no log probability."""
        entries = []
        for id, position in zip(self._flight.request.tokens, positions):
            logprob = finite(position[id].logprob) if position else None
            entries.append({"id": id, "text": self._text(id), "logprob": logprob})
        return entries

    def _seed(self) -> int | None:
        return self._flight.request.seed if self._parameters.samples else None

    def _text(self, id: int) -> str:
        tokenizer = self._generation.model.tokenizer
        return tokenizer.token_text(id) if tokenizer else ""

    def _token(self, id: int, position: TokenLogprobs) -> dict[str, Any]:
        tokenizer = self._generation.model.tokenizer
        return {
            "id": id,
            "text": self._text(id),
            "logprob": finite(position[id].logprob) if id in position else 0.0,
            "special": tokenizer is not None and id in tokenizer.special_ids,
        }

    def _top(self, position: TokenLogprobs) -> list[dict[str, Any]]:
        ranked = sorted(position, key=lambda id: -position[id].logprob)[: self._parameters.top_n_tokens]
        return [self._token(id, position) for id in ranked]

    # streamed

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._generation.stream()) as items:
            async for _, batch in items:
                events = await shaped(self._generation.num_in(batch), partial(self._told, batch))
                if events:
                    yield events

    def _told(self, batch: list[StreamDelta]) -> bytes:
        return b"".join([one for item in batch for one in self._events(item)])

    def _events(self, item: StreamDelta) -> list[bytes]:
        """One event per token. All pieces of text together are the answer: what came with several tokens goes to the
        last of them, special ones aside, which show their own name."""
        self._texts.append(item.text)
        ids = list(zip(item.token_ids, item.logprobs))
        tokens = [self._token(id, position) for id, position in ids]
        plain = [token for token in tokens if not token["special"]] or (tokens[-1:] if item.text else [])
        for token in plain:
            token["text"] = item.text if token is plain[-1] else ""
        events: list[dict[str, Any]] = []
        for token, (_, position) in zip(tokens, ids):
            self._num_tokens += 1
            events.append({"index": self._num_tokens, "token": token, "generated_text": None, "details": None})
            if self._parameters.top_n_tokens:
                events[-1]["top_tokens"] = self._top(position)
        if item.finish_reason is not None and events:
            events[-1] |= {**self._end(item), **self._generation.relaxed}
        return [event(one) for one in events]

    def _end(self, item: StreamDelta) -> dict[str, Any]:
        return {
            "generated_text": self._full("".join(self._texts)),
            "details": {
                "finish_reason": finish_reason(item.finish_reason, item.stop_reason),
                "generated_tokens": self._num_tokens,
                "seed": self._seed(),
                "input_length": len(self._flight.request.tokens),
            },
        }


def finish_reason(reason: str | None, stop: int | str | None) -> str:
    if reason == "length":
        return "length"
    return "stop_sequence" if isinstance(stop, str) else "eos_token"


def _score(output: CompletionOutput) -> float:
    return output.cumulative_logprob or 0.0
