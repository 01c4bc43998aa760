"""An answer in Ollama's shape: lines of JSON, or one document."""

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

from penstock.server.context import shaped, shaped_whole
from penstock.server.errors import ApiError, ollama_shape
from penstock.server.generation import Generation
from penstock.server.logprobs import chat_logprobs
from penstock.server.turn import Call, Turn
from penstock.types import StreamDelta

MEDIA_TYPE = "application/x-ndjson"


def line(value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def failed(error: ApiError) -> bytes:
    """What ends a stream that broke."""
    return line(ollama_shape(error)[1])


def timestamp(when_s: float | None = None) -> str:
    when = datetime.fromtimestamp(time.time() if when_s is None else when_s, timezone.utc)
    return when.isoformat().replace("+00:00", "Z")


@dataclass
class Clock:
    """From the request's arrival, by time.monotonic()."""

    begun_s: float
    load_s: float = 0.0

    def durations(self) -> dict[str, int]:
        return {"total_duration": _ns(time.monotonic() - self.begun_s), "load_duration": _ns(self.load_s)}


def _ns(seconds: float) -> int:
    return int(1e9 * max(0.0, seconds))


@dataclass
class Head:
    """What stands in every line; `chats` says whether the text is a message or a response."""

    model: str
    chats: bool

    def said(self, text: str, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self.chats:
            return {**self._top(), "response": text, **more}
        message = {"role": "assistant", "content": text, **more}
        if calls:
            message["tool_calls"] = calls
        return {**self._top(), "message": message}

    def nothing(self, done_reason: str) -> dict[str, Any]:
        """The answer to a request that only loads or unloads."""
        return {**self.said(""), "done": True, "done_reason": done_reason}

    def _top(self) -> dict[str, Any]:
        return {"model": self.model, "created_at": timestamp()}


class OllamaAnswer:
    def __init__(self, head: Head, turn: Turn, generation: Generation, clock: Clock, num_top: int | None) -> None:
        """`num_top` is how many likeliest tokens are shown of each position, None for no log probabilities at all."""
        self._head, self._turn, self._generation, self._clock, self._num_top = head, turn, generation, clock, num_top
        self._num_calls = 0  # told so far

    async def whole(self) -> Any:
        async with contextlib.aclosing(self._generation.stream()) as items:
            async for _, batch in items:
                for item in batch:
                    self._turn.push(item)
        return await shaped_whole(self._generation, self._whole)

    def _whole(self) -> dict[str, Any]:
        turn = self._turn
        said = self._head.said(turn.content or "", turn.reasoning or "", self._calls(last=True))
        if self._num_top is not None:
            said["logprobs"] = chat_logprobs(turn.logprobs, self._num_top)
        return said | self._end()

    async def lines(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._generation.stream()) as items:
            async for _, batch in items:
                said = await shaped(self._generation.num_in(batch), partial(self._line, batch))
                if said:
                    yield said
        yield line(self._head.said("") | self._end())

    def _line(self, batch: list[StreamDelta]) -> bytes:
        said = self._said(batch)
        return line({**said, "done": False}) if said else b""

    def _said(self, batch: list[StreamDelta]) -> dict[str, Any] | None:
        deltas = [delta for item in batch for delta in self._turn.push(item)]
        text = "".join(delta.get("content", "") for delta in deltas)
        thinking = "".join(delta.get("reasoning_content", "") for delta in deltas)
        calls = self._calls(last=self._turn.finish_reason is not None)
        logprobs = [position for item in batch for position in item.logprobs] if self._num_top is not None else []
        if not (text or thinking or calls or logprobs):
            return None
        said = self._head.said(text, thinking, calls)
        if logprobs:
            said["logprobs"] = chat_logprobs(logprobs, self._num_top or 0)
        return said

    def _calls(self, last: bool) -> list[dict[str, Any]]:
        """The calls that are whole by now: all but the one that may still grow."""
        whole = self._turn.calls[self._num_calls :] if last else self._turn.calls[self._num_calls : -1]
        self._num_calls += len(whole)
        return [shown for call in whole if (shown := _call(call)) is not None]

    def _end(self) -> dict[str, Any]:
        times, usage = self._generation.times, self._generation.usage
        end = times.end_s or time.monotonic()
        first = times.first_s or end
        return {
            "done": True,
            "done_reason": "length" if self._turn.finish_reason == "length" else "stop",
            **self._clock.durations(),
            "prompt_eval_count": usage.num_prompt,
            "prompt_eval_duration": _ns(first - times.begun_s),
            "eval_count": usage.num_output,
            "eval_duration": _ns(end - first),
            **self._generation.relaxed,
        }


def _call(call: Call) -> dict[str, Any] | None:
    """With its arguments as an object; a call that was cut off is none."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        return None
    return {"id": call.id, "function": {"name": call.name, "arguments": arguments}}
