"""Format responses for Ollama: JSON lines, or one document."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

import msgspec

from penstock.server.common.message_builder import CallBuilder, MessageBuilder
from penstock.server.generation import Generation
from penstock.server.http.context import format_whole, run_formatting
from penstock.server.http.errors import ApiError, format_ollama
from penstock.server.openai.logprobs import format_chat_logprobs
from penstock.types import StreamDelta

MEDIA_TYPE = "application/x-ndjson"


def encode_line(value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def encode_failure(error: ApiError) -> bytes:
    """Encode the line that ends a broken stream."""
    return encode_line(format_ollama(error)[1])


def format_time(when_s: float | None = None) -> str:
    when = datetime.fromtimestamp(time.time() if when_s is None else when_s, timezone.utc)
    return when.isoformat().replace("+00:00", "Z")


@dataclass
class RequestClock:
    """A request's times, by time.monotonic()."""

    begun_s: float
    load_s: float = 0.0

    def durations(self) -> dict[str, int]:
        return {"total_duration": _ns(time.monotonic() - self.begun_s), "load_duration": _ns(self.load_s)}


def _ns(seconds: float) -> int:
    return int(1e9 * max(0.0, seconds))


@dataclass
class LineHead:
    """Common fields of every line; `chats` selects `message` over `response`."""

    model: str
    chats: bool

    def format_text(self, text: str, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self.chats:
            return {**self._make_fields(), "response": text, **more}
        message = {"role": "assistant", "content": text, **more}
        if calls:
            message["tool_calls"] = calls
        return {**self._make_fields(), "message": message}

    def format_empty(self, done_reason: str) -> dict[str, Any]:
        """Format the response to a request that only loads or unloads."""
        return {**self.format_text(""), "done": True, "done_reason": done_reason}

    def _make_fields(self) -> dict[str, Any]:
        return {"model": self.model, "created_at": format_time()}


class OllamaAnswer:
    def __init__(
        self, head: LineHead, builder: MessageBuilder, generation: Generation, clock: RequestClock, num_top: int | None
    ) -> None:
        """Make the answer; `num_top` is the number of top logprobs per token, None for no logprobs."""
        self._head, self._builder, self._generation, self._clock, self._num_top = (
            head,
            builder,
            generation,
            clock,
            num_top,
        )
        self._num_calls = 0  # sent so far

    async def collect(self) -> Any:
        async with contextlib.aclosing(self._generation.stream()) as items:
            async for _, batch in items:
                for item in batch:
                    self._builder.push(item)
        return await format_whole(self._generation, self._format)

    def _format(self) -> dict[str, Any]:
        builder = self._builder
        format_text = self._head.format_text(
            builder.content or "", builder.reasoning or "", self._take_calls(last=True)
        )
        if self._num_top is not None:
            format_text["logprobs"] = format_chat_logprobs(builder.logprobs, self._num_top)
        return format_text | self._format_end()

    async def lines(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._generation.stream()) as items:
            async for _, batch in items:
                format_text = await run_formatting(
                    self._generation.count_logprobs(batch), partial(self._encode_batch, batch)
                )
                if format_text:
                    yield format_text
        yield encode_line(self._head.format_text("") | self._format_end())

    def _encode_batch(self, batch: list[StreamDelta]) -> bytes:
        format_text = self._format_batch(batch)
        return encode_line({**format_text, "done": False}) if format_text else b""

    def _format_batch(self, batch: list[StreamDelta]) -> dict[str, Any] | None:
        deltas = [delta for item in batch for delta in self._builder.push(item)]
        text = "".join(delta.get("content", "") for delta in deltas)
        thinking = "".join(delta.get("reasoning_content", "") for delta in deltas)
        calls = self._take_calls(last=self._builder.finish_reason is not None)
        logprobs = [position for item in batch for position in item.logprobs] if self._num_top is not None else []
        if not (text or thinking or calls or logprobs):
            return None
        format_text = self._head.format_text(text, thinking, calls)
        if logprobs:
            format_text["logprobs"] = format_chat_logprobs(logprobs, self._num_top or 0)
        return format_text

    def _take_calls(self, last: bool) -> list[dict[str, Any]]:
        """Take the calls that are complete: all but one that may still grow."""
        complete = self._builder.calls[self._num_calls :] if last else self._builder.calls[self._num_calls : -1]
        self._num_calls += len(complete)
        return [formatted for call in complete if (formatted := _format_call(call)) is not None]

    def _format_end(self) -> dict[str, Any]:
        times, usage = self._generation.times, self._generation.usage
        end = times.end_s or time.monotonic()
        first = times.first_s or end
        return {
            "done": True,
            "done_reason": "length" if self._builder.finish_reason == "length" else "stop",
            **self._clock.durations(),
            "prompt_eval_count": usage.num_prompt,
            "prompt_eval_duration": _ns(first - times.begun_s),
            "eval_count": usage.num_output,
            "eval_duration": _ns(end - first),
            **usage.energy,
            **self._generation.relaxed,
            **self._generation.ledger,
        }


def _format_call(call: CallBuilder) -> dict[str, Any] | None:
    """Format a call with its arguments as an object; None if it is truncated."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        return None
    return {"id": call.id, "function": {"name": call.name, "arguments": arguments}}
