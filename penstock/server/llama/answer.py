"""Answers of /completion and /infill, in llama-server's format."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from penstock.server.generation import Generation, Usage
from penstock.server.http import sse
from penstock.server.http.context import format_whole
from penstock.server.http.errors import ApiError, format_llama
from penstock.server.llama.body import NativeBody, format_request_settings
from penstock.server.openai.logprobs import clamp
from penstock.types import StreamDelta, TokenLogprobs


@dataclass
class _NativeOutput:
    """One answer so far."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str | None = None
    stop: int | str | None = None
    has_new_line: bool = False
    first_s: float = 0.0

    def add(self, item: StreamDelta) -> None:
        if not self.ids:
            self.first_s = time.monotonic()
        self.texts.append(item.text)
        self.ids += item.token_ids
        self.logprobs += item.logprobs
        self.reason, self.stop = item.finish_reason, item.stop_reason
        self.has_new_line = self.has_new_line or "\n" in item.text

    def is_over(self, max_ms: int) -> bool:
        """True if it has taken longer than `max_ms` since its first token, and has a new line."""
        return max_ms > 0 and self.has_new_line and 1e3 * (time.monotonic() - self.first_s) > max_ms


def encode_failure(error: ApiError) -> bytes:
    return sse.event(format_llama(error)[1])


class NativeAnswer:
    """The answers to one body: a list of them if it `is_list`."""

    def __init__(self, body: NativeBody, generation: Generation, is_list: bool = False) -> None:
        self._body, self._generation, self._is_list = body, generation, is_list
        self._num_each = body.n or 1
        self._is_silent = body.max_tokens == 0
        self._answers = [[_NativeOutput() for _ in range(self._num_each)] for _ in generation.flights]

    async def collect(self) -> Any:
        async for _ in self._follow():
            pass
        prompts = [await self._decode_prompt(number) for number in range(len(self._generation.flights))]
        return await format_whole(self._generation, lambda: self._format(prompts))

    def _format(self, prompts: list[str]) -> Any:
        found = []
        for number, answers in enumerate(self._answers):
            for index, answer in enumerate(answers):
                text = self._format_text(number, index, "".join(answer.texts), answer.ids)
                whole = {**text, **self._format_end(number, index, prompts[number])}
                if self._body.n_probs:
                    whole["completion_probabilities"] = self._format_logprobs(answer.ids, answer.logprobs)
                found.append(self._choose_fields(whole))
        return found if self._is_list else found[0]

    async def _follow(self) -> AsyncGenerator[tuple[int, StreamDelta], None]:
        """Yield deltas and their prompts' numbers; end an answer that takes too long."""
        num_open = sum(len(answers) for answers in self._answers)
        async with contextlib.aclosing(self._generation.stream()) as items:
            async for number, batch in items:
                for item in batch:
                    answer = self._answers[number][item.index]
                    if answer.reason is not None:
                        continue
                    answer.add(item)
                    if answer.reason is None and answer.is_over(self._body.t_max_predict_ms):
                        answer.reason = "length"
                    yield number, item
                    num_open -= answer.reason is not None
                if not num_open:
                    break

    def _choose_fields(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Keep the fields that were asked for; `a/b` is the field b of a."""
        if not self._body.response_fields:
            return answer
        found: dict[str, Any] = {}
        for path in self._body.response_fields:
            value: Any = answer
            for part in path.split("/"):
                value = value.get(part, found) if isinstance(value, dict) else found
            if value is not found:
                found[path] = value
        return found

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._follow()) as items:
            async for number, item in items:
                if item.token_ids or item.text:
                    yield sse.event(self._format_chunk(number, item))
                if self._answers[number][item.index].reason is not None:
                    end = self._format_end(number, item.index, await self._decode_prompt(number))
                    yield sse.event(self._choose_fields({**self._format_text(number, item.index, "", []), **end}))

    def _format_chunk(self, number: int, item: StreamDelta) -> dict[str, Any]:
        ids = list(item.token_ids)
        chunk = {**self._format_text(number, item.index, item.text, ids), "stop": False}
        if self._body.n_probs:
            chunk["completion_probabilities"] = self._format_logprobs(ids, list(item.logprobs))
        if self._body.timings_per_token:
            chunk["timings"] = self._format_timings(number, item.index)
        return chunk

    async def _decode_prompt(self, number: int) -> str:
        return await self._generation.model.text.decode(self._generation.flights[number].request.tokens)

    def _format_text(self, number: int, index: int, text: str, ids: list[int]) -> dict[str, Any]:
        shows_ids = (self._body.return_tokens or self._body.stream) and not self._is_silent
        return {
            "index": number * self._num_each + index,
            "content": "" if self._is_silent else text,
            "tokens": ids if shows_ids else [],
            "id_slot": max(0, self._body.id_slot or 0),
            "tokens_predicted": 0 if self._is_silent else len(self._answers[number][index].ids),
            "tokens_evaluated": len(self._generation.flights[number].request.tokens),
        }

    def _format_timings(self, number: int, index: int) -> dict[str, float]:
        flight = self._generation.flights[number]
        usage = Usage(len(flight.request.tokens), len(self._answers[number][index].ids), flight.num_cached)
        return self._generation.times.format_timings(usage)

    def _format_end(self, number: int, index: int, prompt: str) -> dict[str, Any]:
        generation, answer = self._generation, self._answers[number][index]
        request, intake = generation.flights[number].request, generation.model.text.intake
        word = answer.stop if isinstance(answer.stop, str) else ""
        num_tokens = len(request.tokens) + len(answer.ids)
        return {
            "stop": True,
            "model": generation.model.name,
            "generation_settings": format_request_settings(request, self._body, intake.max_output_tokens),
            "prompt": prompt,
            "has_new_line": answer.has_new_line and not self._is_silent,
            "truncated": answer.reason == "length" and num_tokens >= intake.longest,
            "stop_type": "limit" if answer.reason == "length" else "word" if word else "eos",
            "stopping_word": word,
            "tokens_cached": num_tokens,
            "timings": self._format_timings(number, index),
            **generation.usage.energy,
            **generation.relaxed,
            **generation.ledger,
        }

    def _format_logprobs(self, ids: list[int], positions: list[TokenLogprobs]) -> list[dict[str, Any]]:
        name = "top_probs" if self._body.post_sampling_probs else "top_logprobs"
        return [
            {**self._format_token(id, position), name: self._format_top(position)}
            for id, position in zip(ids, positions)
        ]

    def _format_top(self, position: TokenLogprobs) -> list[dict[str, Any]]:
        ranked = sorted(position, key=lambda id: -position[id].logprob)[: self._body.n_probs]
        return [self._format_token(id, position) for id in ranked]

    def _format_token(self, id: int, position: TokenLogprobs) -> dict[str, Any]:
        text, tokenizer = position[id].decoded_token or "", self._generation.model.tokenizer
        spelled = tokenizer.spelling[id] if tokenizer is not None else text
        spelled = spelled if isinstance(spelled, bytes) else spelled.encode()
        logprob = position[id].logprob
        value = {"prob": math.exp(logprob)} if self._body.post_sampling_probs else {"logprob": clamp(logprob)}
        return {"id": id, "token": text, "bytes": list(spelled), **value}
