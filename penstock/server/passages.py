"""An answer as a row of passages (reasoning, text, calls), as the dialects beyond chat completions tell it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.server.conversation import Conversation
from penstock.server.generation import Generation
from penstock.server.turn import Turn
from penstock.types import StreamDelta, TokenLogprobs

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Passage:
    kind: Kind
    index: int
    id: str = ""  # of a call, and its name
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What is said or thought; of a call, its arguments."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class Change:
    """What happens to a passage; `text` and `logprobs` are what it gained."""

    what: Literal["begin", "more", "end"]
    passage: Passage
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


class Passages:
    """The passages so far. Space alone, behind another passage, is none."""

    def __init__(self, conversation: Conversation) -> None:
        self.turn = Turn(conversation)
        self.all: list[Passage] = []
        self._open: Passage | None = None
        self._space = ""
        self._logprobs: list[TokenLogprobs] = []

    @property
    def num_reasoning_tokens(self) -> int:
        return self.turn.num_reasoning_tokens

    @property
    def calls(self) -> list[Passage]:
        return [passage for passage in self.all if passage.kind == "call"]

    async def follow(self, generation: Generation) -> AsyncGenerator[list[Change], None]:
        """Take in a generation, batch by batch, until it ends."""
        async with contextlib.aclosing(generation.stream()) as items:
            async for _, batch in items:
                yield [change for item in batch for change in self.push(item)]

    def push(self, item: StreamDelta) -> list[Change]:
        self._logprobs += item.logprobs
        changes: list[Change] = []
        for delta in self.turn.push(item):
            changes += self._take(delta)
        if item.finish_reason is not None:
            changes += self._text(self._space) if self._space and not self.all else []
            changes += self._close()
        return changes

    def _take(self, delta: dict[str, Any]) -> list[Change]:
        if "reasoning_content" in delta:
            return self._more("reasoning", delta["reasoning_content"])
        if "content" in delta:
            self._space += delta["content"]
            held = self._space.isspace() and not (self._open is not None and self._open.kind == "text")
            return [] if held else self._text(self._space)
        call = delta["tool_calls"][0]
        if "id" in call:
            return self._begin("call", id=call["id"], name=call["function"]["name"])
        return self._more("call", call["function"]["arguments"])

    def _text(self, text: str) -> list[Change]:
        self._space = ""
        return self._more("text", text) if text else []

    def _more(self, kind: Kind, text: str) -> list[Change]:
        begun = [] if self._open is not None and self._open.kind == kind else self._begin(kind)
        passage = self.all[-1]
        logprobs = tuple(self._logprobs) if kind == "text" else ()
        passage.pieces.append(text)
        passage.logprobs += logprobs
        self._logprobs.clear()
        return [*begun, Change("more", passage, text, logprobs)]

    def _begin(self, kind: Kind, id: str = "", name: str = "") -> list[Change]:
        ended = self._close()
        self._open = Passage(kind, len(self.all), id=id, name=name)
        self.all.append(self._open)
        return [*ended, Change("begin", self._open)]

    def _close(self) -> list[Change]:
        passage, self._open, self._space = self._open, None, ""
        return [Change("end", passage)] if passage is not None else []
