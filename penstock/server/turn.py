"""One answer as it grows: its text, its reasoning and its tool calls, taken apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.server.conversation import Conversation
from penstock.text.events import CallArguments, CallBegin, Event, Reasoning, Text
from penstock.types import StreamDelta, TokenLogprobs


@dataclass
class Call:
    id: str
    name: str
    arguments: str = ""

    def openai(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Turn:
    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._splitter = conversation.new_splitter()
        self._parser = conversation.new_parser()
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self.calls: list[Call] = []
        self.logprobs: list[TokenLogprobs] = []
        self.token_ids: list[int] = []
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # without names
        self.stop_reason: int | str | None = None
        self.num_reasoning_tokens = 0  # with those of the markers
        self._forced_closing = False
        self._finish_reason: str | None = None

    @property
    def content(self) -> str | None:
        text = "".join(self._texts)
        return text if text or not self.calls else None

    @property
    def reasoning(self) -> str | None:
        return "".join(self._thoughts) if self._thoughts else None

    @property
    def finish_reason(self) -> str | None:
        """As OpenAI has it: a named function's call ends with stop, a call the model chose with tool_calls. Text that
        may be any is cut off where its tokens are used up."""
        if self._is_cut:
            return "length"
        if self._finish_reason == "stop" and self.calls and not self._conversation.named:
            return "tool_calls"
        return self._finish_reason

    @property
    def forced_closing(self) -> bool:
        return self._forced_closing and not self._is_cut

    @property
    def _is_cut(self) -> bool:
        return self._forced_closing and self._conversation.is_open and not self.calls

    def push(self, item: StreamDelta) -> list[dict[str, Any]]:
        """Take in what came; the message's deltas in OpenAI's form."""
        self.token_ids += item.token_ids
        self.logprobs += item.logprobs
        if item.prompt_logprobs is not None:
            self.prompt_logprobs = item.prompt_logprobs
        thought = self._splitter is not None and self._splitter.is_inside
        events = self._events(item.text, item.finish_reason is not None)
        if thought or self._splitter is not None and self._splitter.is_inside:
            self.num_reasoning_tokens += len(item.token_ids)
        if item.finish_reason is not None:
            self._finish_reason, self.stop_reason = item.finish_reason, item.stop_reason
            self._forced_closing = item.forced_closing
        return [self._take(event) for event in events if not self._is_beyond(event)]

    def _is_beyond(self, event: Event) -> bool:
        most = self._conversation.most_calls
        return most is not None and isinstance(event, (CallBegin, CallArguments)) and event.index >= most

    def _events(self, text: str, last: bool) -> list[Event]:
        parts: list[Event] = [Text(text)] if text else []
        if self._splitter is not None:
            parts = [*self._splitter.push(text), *(self._splitter.finish() if last else [])]
        if self._parser is None:
            return parts
        events: list[Event] = []
        for part in parts:
            events += self._parser.push(part.text) if isinstance(part, Text) else [part]
        return events + (self._parser.finish() if last else [])

    def _take(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Text):
            self._texts.append(event.text)
            return {"content": event.text}
        if isinstance(event, Reasoning):
            self._thoughts.append(event.text)
            return {"reasoning_content": event.text}
        if isinstance(event, CallBegin):
            self.calls.append(Call(event.id, event.name))
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
