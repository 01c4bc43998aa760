"""Answers of /generate in SGLang's format; each event of a stream holds all of its answer so far."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.server.generation import Generation
from penstock.server.http import sse
from penstock.server.http.context import format_whole, new_id, run_formatting
from penstock.server.openai.logprobs import add_token_texts, clamp
from penstock.server.sglang.body import SglangBody
from penstock.types import CompletionOutput, StreamDelta, TokenLogprobs


@dataclass
class _SglangOutput:
    """One answer so far."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str | None = None
    stop: int | str | None = None

    def add(self, delta: StreamDelta | CompletionOutput) -> None:
        self.text += delta.text
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.reason, self.stop = delta.finish_reason, delta.stop_reason


class SglangAnswer:
    def __init__(self, body: SglangBody, generation: Generation) -> None:
        self._body, self._generation = body, generation
        flights = generation.flights
        self._answers = [[_SglangOutput() for _ in range(flight.request.sampling.n)] for flight in flights]
        self._firsts = [sum(len(one) for one in self._answers[:number]) for number in range(len(flights))]
        self._ids = [self._find_rid(number) for number in range(len(flights))]
        self._prompts: dict[int, list[TokenLogprobs | None]] = {}
        self._is_list = body.is_batch or len(self._answers[0]) > 1

    def _find_rid(self, number: int) -> str:
        rid = self._body.of_prompt("rid", number)
        return new_id("") if rid is None else str(rid)

    async def collect(self) -> Any:
        await self._generation.wait()
        return await format_whole(self._generation, self._format)

    def _format(self) -> Any:
        for number, flight in enumerate(self._generation.flights):
            output = flight.collector.output()
            self._take_prompt(number, output.prompt_logprobs or ())
            for one in output.outputs:
                self._answers[number][one.index].add(one)
        found = [
            self._format_answer(number, index)
            for number, answers in enumerate(self._answers)
            for index in range(len(answers))
        ]
        return found if self._is_list else found[0]

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._generation.stream()) as items:
            async for number, batch in items:
                for item in batch:
                    answer = self._answers[number][item.index]
                    answer.add(item)
                    if item.prompt_logprobs is not None:
                        self._take_prompt(number, item.prompt_logprobs)
                    count = len(answer.logprobs) + len(self._prompts.get(number, ()))
                    top = 1 + int(self._body.of_prompt("top_logprobs_num", number))
                    yield await run_formatting(count * top, partial(self._encode_event, number, item.index))
        yield sse.DONE

    def _encode_event(self, number: int, index: int) -> bytes:
        place = {"index": self._firsts[number] + index} if self._is_list else {}
        return sse.event({**place, **self._format_answer(number, index)})

    def _take_prompt(self, number: int, positions: Iterable[TokenLogprobs | None]) -> None:
        self._prompts[number] = add_token_texts(positions, self._generation.model.tokenizer)

    def _format_answer(self, number: int, index: int) -> dict[str, Any]:
        answer, generation = self._answers[number][index], self._generation
        flight = generation.flights[number]
        is_silent = self._body.of_prompt("sampling_params", number).max_new_tokens == 0
        text, ids = ("", []) if is_silent else (answer.text, answer.ids)
        end_s = generation.times.end_s or time.monotonic()
        meta: dict[str, Any] = {
            "id": self._ids[number],
            "finish_reason": self._format_reason(number, answer, len(ids)),
            "prompt_tokens": len(flight.request.tokens),
            "completion_tokens": len(ids),
            "cached_tokens": flight.num_cached,
            "e2e_latency": end_s - generation.times.begun_s,
            **generation.usage.energy,
        }
        if self._body.of_prompt("return_logprob", number):
            meta |= self._format_logprobs(number, ids, answer.logprobs)
        extras = {**generation.relaxed, **generation.ledger} if answer.reason is not None else {}
        return {"text": text, "output_ids": ids, "meta_info": meta, **extras}

    def _format_reason(self, number: int, answer: _SglangOutput, num_tokens: int) -> dict[str, Any] | None:
        if answer.reason is None:
            return None
        if answer.reason == "length" or not num_tokens:
            return {"type": "length", "length": num_tokens}
        matched = self._generation.find_matched_stop(number, answer.reason, answer.stop, answer.ids)
        return {"type": answer.reason, "matched": matched}

    def _format_logprobs(self, number: int, ids: list[int], positions: list[TokenLogprobs]) -> dict[str, Any]:
        num_top = self._body.of_prompt("top_logprobs_num", number)
        start = self._body.of_prompt("logprob_start_len", number)
        prompt_ids = self._generation.flights[number].request.tokens
        before = self._prompts.get(number, [])[start:] if start >= 0 else []
        found: dict[str, Any] = {
            "input_token_logprobs": self._format_tokens(prompt_ids[start:] if before else (), before),
            "output_token_logprobs": self._format_tokens(ids, positions),
        }
        if token_ids := self._body.token_ids_of(number):
            found["output_token_ids_logprobs"] = [
                [self._format_token(id, position) for id in token_ids] for position in positions[: len(ids)]
            ]
        if num_top:
            found["input_top_logprobs"] = [self._format_top(position, num_top) for position in before]
            found["output_top_logprobs"] = [self._format_top(one, num_top) for one in positions[: len(ids)]]
        return found

    def _format_tokens(
        self, ids: Iterable[int], positions: Iterable[TokenLogprobs | None]
    ) -> list[tuple[float | None, int, str | None]]:
        """Format tokens as (logprob, id, text); a prompt's first has no logprob."""
        return [
            (None, id, self._show(id, None)) if position is None else self._format_token(id, position)
            for id, position in zip(ids, positions)
        ]

    def _format_token(self, id: int, position: TokenLogprobs) -> tuple[float, int, str | None]:
        return clamp(position[id].logprob), id, self._show(id, position[id].decoded_token)

    def _show(self, id: int, text: str | None) -> str | None:
        if not self._body.return_text_in_logprobs:
            return None
        tokenizer = self._generation.model.tokenizer
        return tokenizer.token_text(id) if text is None and tokenizer is not None else text

    def _format_top(self, position: TokenLogprobs | None, num_top: int) -> list[Any] | None:
        if position is None:
            return None
        ranked = sorted(position, key=lambda id: -position[id].logprob)[:num_top]
        return [self._format_token(id, position) for id in ranked]
