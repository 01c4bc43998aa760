"""Answers as an engine would give them, without one: what the dialects make of reasoning and calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from penstock.server.common.chat_prompt import ChatPrompt
from penstock.server.generation import Generation, Usage
from penstock.text.prompt_encoder import Encoded
from penstock.types import SamplingParams, StreamDelta

THOUGHT_AND_CALLS = (
    "<think>\nLook it up.\n</think>\n\nOne moment.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Genf"}}\n</tool_call>\n'
)


class Recorded(Generation):
    """A generation of one answer, a few characters at a time."""

    def __init__(
        self,
        text: str,
        finish_reason: str = "stop",
        stop_reason: str | None = None,
        size: int = 3,
        error: Exception | None = None,
    ) -> None:
        self.usage = Usage(num_prompt=10, num_cached=4)
        self.model: Any = SimpleNamespace(name="m")
        self._end, self._error = (finish_reason, stop_reason), error
        self._pieces = [text[at : at + size] for at in range(0, len(text), size)]

    async def stream(self) -> AsyncGenerator[tuple[int, list[StreamDelta]], None]:
        for number, piece in enumerate(self._pieces):
            item = StreamDelta("r1", 0, piece, (number,))
            self.usage.num_output += len(item.token_ids)
            yield 0, [item]
        if self._error is not None:
            raise self._error
        yield 0, [StreamDelta("r1", 0, "", (), finish_reason=self._end[0], stop_reason=self._end[1])]


def chat_prompt(max_calls: int | None = None) -> ChatPrompt:
    return ChatPrompt(Encoded([1] * 10), SamplingParams(), "hermes", False, "qwen3", max_calls)


async def joined(events: AsyncGenerator[bytes, None]) -> bytes:
    return b"".join([event async for event in events])
