"""Build a response from deltas: a message, or items in order."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.server.common.chat_prompt import ChatPrompt
from penstock.server.generation import Generation
from penstock.text.answer_events import CallArguments, CallBegin, Event, ReasoningDelta, TextDelta
from penstock.types import StreamDelta, TokenLogprobs

Kind = Literal["reasoning", "text", "call"]


@dataclass
class CallBuilder:
    """A tool call as its arguments arrive."""

    id: str
    name: str
    arguments: str = ""

    def to_openai(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class MessageBuilder:
    def __init__(self, chat_prompt: ChatPrompt) -> None:
        self._chat_prompt = chat_prompt
        self._splitter = chat_prompt.new_splitter()
        self._parser = chat_prompt.new_parser()
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[CallBuilder] = []
        self.logprobs: list[TokenLogprobs] = []
        self.token_ids: list[int] = []
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # without token texts
        self.stop_reason: int | str | None = None
        self.num_reasoning_tokens = 0  # markers included
        self._forced_closing = False
        self._finish_reason: str | None = None

    @property
    def content(self) -> str | None:
        text = "".join(self._texts)
        return text if text or not self.calls else None

    @property
    def reasoning(self) -> str | None:
        return "".join(self._reasoning) if self._reasoning else None

    @property
    def finish_reason(self) -> str | None:
        """Return OpenAI's finish reason: tool_calls for a call the model chose, stop for a forced one. Free text that
        was closed by force ends with length."""
        if self._is_cut:
            return "length"
        if self._finish_reason == "stop" and self.calls and not self._chat_prompt.named:
            return "tool_calls"
        return self._finish_reason

    @property
    def forced_closing(self) -> bool:
        return self._forced_closing and not self._is_cut

    @property
    def _is_cut(self) -> bool:
        return self._forced_closing and self._chat_prompt.is_open and not self.calls

    @property
    def is_plain(self) -> bool:
        """True if all text is content: no reasoning and no calls are looked for."""
        return self._splitter is None and self._parser is None

    def add_text(self, item: StreamDelta) -> None:
        """Add a delta that is content alone and does not end the message; only if `is_plain`."""
        self.token_ids += item.token_ids
        self._texts.append(item.text)

    def push(self, item: StreamDelta) -> list[dict[str, Any]]:
        """Add a delta; return the message's deltas in OpenAI's format."""
        self.token_ids += item.token_ids
        self.logprobs += item.logprobs
        if item.prompt_logprobs is not None:
            self.prompt_logprobs = item.prompt_logprobs
        was_reasoning = self._splitter is not None and self._splitter.is_inside
        events = self._parse(item.text, item.finish_reason is not None)
        if was_reasoning or self._splitter is not None and self._splitter.is_inside:
            self.num_reasoning_tokens += len(item.token_ids)
        if item.finish_reason is not None:
            self._finish_reason, self.stop_reason = item.finish_reason, item.stop_reason
            self._forced_closing = item.forced_closing
        return [self._take(event) for event in events if not self._is_dropped(event)]

    def _is_dropped(self, event: Event) -> bool:
        max_calls = self._chat_prompt.max_calls
        return max_calls is not None and isinstance(event, (CallBegin, CallArguments)) and event.index >= max_calls

    def _parse(self, text: str, last: bool) -> list[Event]:
        parts: list[Event] = [TextDelta(text)] if text else []
        if self._splitter is not None:
            parts = [*self._splitter.push(text), *(self._splitter.finish() if last else [])]
        if self._parser is None:
            return parts
        events: list[Event] = []
        for part in parts:
            events += self._parser.push(part.text) if isinstance(part, TextDelta) else [part]
        return events + (self._parser.finish() if last else [])

    def _take(self, event: Event) -> dict[str, Any]:
        if isinstance(event, TextDelta):
            self._texts.append(event.text)
            return {"content": event.text}
        if isinstance(event, ReasoningDelta):
            self._reasoning.append(event.text)
            return {"reasoning_content": event.text}
        if isinstance(event, CallBegin):
            self.calls.append(CallBuilder(event.id, event.name))
            return {
                "tool_calls": [
                    {
                        "index": event.index,
                        "id": event.id,
                        "type": "function",
                        "function": {"name": event.name, "arguments": ""},
                    }
                ]
            }
        assert isinstance(event, CallArguments)
        self.calls[event.index].arguments += event.text
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


@dataclass
class OutputItem:
    """One item of an output, as it grows."""

    kind: Kind
    index: int
    id: str = ""  # a call's id and name
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The item's text; a call's arguments."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class ItemChange:
    """A change of an item; `text` and `logprobs` are what was added."""

    what: Literal["begin", "more", "end"]
    output_item: OutputItem
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


class OutputItems:
    """All items so far. Whitespace between items is dropped."""

    def __init__(self, chat_prompt: ChatPrompt) -> None:
        self.builder = MessageBuilder(chat_prompt)
        self.all: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._space = ""
        self._logprobs: list[TokenLogprobs] = []

    @property
    def calls(self) -> list[OutputItem]:
        return [output_item for output_item in self.all if output_item.kind == "call"]

    async def follow(self, generation: Generation) -> AsyncGenerator[list[ItemChange], None]:
        async with contextlib.aclosing(generation.stream()) as items:
            async for _, batch in items:
                yield [change for item in batch for change in self.push(item)]

    def push(self, item: StreamDelta) -> list[ItemChange]:
        self._logprobs += item.logprobs
        changes: list[ItemChange] = []
        for delta in self.builder.push(item):
            changes += self._take(delta)
        if item.finish_reason is not None:
            changes += self._add_text(self._space) if self._space and not self.all else []
            changes += self._close()
        return changes

    def _take(self, delta: dict[str, Any]) -> list[ItemChange]:
        if "reasoning_content" in delta:
            return self._extend("reasoning", delta["reasoning_content"])
        if "content" in delta:
            self._space += delta["content"]
            held = self._space.isspace() and not (self._open is not None and self._open.kind == "text")
            return [] if held else self._add_text(self._space)
        call = delta["tool_calls"][0]
        if "id" in call:
            return self._begin("call", id=call["id"], name=call["function"]["name"])
        return self._extend("call", call["function"]["arguments"])

    def _add_text(self, text: str) -> list[ItemChange]:
        self._space = ""
        return self._extend("text", text) if text else []

    def _extend(self, kind: Kind, text: str) -> list[ItemChange]:
        changes = [] if self._open is not None and self._open.kind == kind else self._begin(kind)
        output_item = self.all[-1]
        logprobs = tuple(self._logprobs) if kind == "text" else ()
        output_item.pieces.append(text)
        output_item.logprobs += logprobs
        self._logprobs.clear()
        return [*changes, ItemChange("more", output_item, text, logprobs)]

    def _begin(self, kind: Kind, id: str = "", name: str = "") -> list[ItemChange]:
        ended = self._close()
        self._open = OutputItem(kind, len(self.all), id=id, name=name)
        self.all.append(self._open)
        return [*ended, ItemChange("begin", self._open)]

    def _close(self) -> list[ItemChange]:
        output_item, self._open, self._space = self._open, None, ""
        return [ItemChange("end", output_item)] if output_item is not None else []
