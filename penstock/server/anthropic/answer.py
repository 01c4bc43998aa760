"""An answer in Anthropic's shapes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from pydantic_core import from_json

from penstock.server import sse
from penstock.server.anthropic.body import MessagesBody
from penstock.server.context import new_id
from penstock.server.conversation import Conversation
from penstock.server.generation import Generation
from penstock.server.passages import Change, Passage, Passages


class MessageAnswer:
    def __init__(self, body: MessagesBody, conversation: Conversation, generation: Generation, *, fills: bool) -> None:
        self.body = body
        self.generation = generation
        self._fills = fills  # the longest sequence ends the answer before max_tokens does
        self._shows_thinking = body.thinking is None or body.thinking.display != "omitted"
        self.passages = Passages(conversation)
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": body.model}

    # whole

    async def whole(self) -> dict[str, Any]:
        async with contextlib.aclosing(self.passages.follow(self.generation)) as batches:
            async for _ in batches:
                pass
        passages = self.passages.all if self.body.max_tokens else []
        return {
            **self._head,
            "content": [self._content(passage) for passage in passages],
            **self._end(),
            "usage": self._usage(),
            **self.generation.relaxed,
        }

    def _content(self, passage: Passage) -> dict[str, Any]:
        if passage.kind == "text":
            return {"type": "text", "text": passage.text, "citations": None}
        if passage.kind == "reasoning":
            return {"type": "thinking", "thinking": passage.text if self._shows_thinking else "", "signature": ""}
        return {"type": "tool_use", "id": _tool_id(passage), "name": passage.name, "input": _object(passage.text)}

    def _end(self) -> dict[str, Any]:
        turn = self.passages.turn
        reason, sequence = "end_turn", None
        if turn.finish_reason == "length":
            reason = "model_context_window_exceeded" if self._fills else "max_tokens"
        elif isinstance(turn.stop_reason, str):
            reason, sequence = "stop_sequence", turn.stop_reason
        elif self.passages.calls:
            reason = "tool_use"
        return {"stop_reason": "max_tokens" if not self.body.max_tokens else reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, Any]:
        usage = self.generation.usage
        told: dict[str, Any] = {
            "input_tokens": usage.num_prompt - usage.num_cached,
            "cache_read_input_tokens": usage.num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.num_output if self.body.max_tokens else 0,
            "service_tier": "standard",
        }
        if self.passages.num_reasoning_tokens:
            told["output_tokens_details"] = {"thinking_tokens": self.passages.num_reasoning_tokens}
        return told

    # streamed

    async def events(self) -> AsyncGenerator[bytes, None]:
        begun = False
        async with contextlib.aclosing(self.passages.follow(self.generation)) as batches:
            async for changes in batches:
                events = [] if begun else self._begin()
                begun = True
                if self.body.max_tokens:
                    events += [event for change in changes for event in self._tell(change)]
                if events:
                    yield _encoded(events)
        yield _encoded(
            [
                {"type": "message_delta", "delta": self._end(), "usage": self._usage(), **self.generation.relaxed},
                {"type": "message_stop"},
            ]
        )

    def _begin(self) -> list[dict[str, Any]]:
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**self._usage(), "output_tokens": 0},
        }
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def _tell(self, change: Change) -> list[dict[str, Any]]:
        passage, index = change.passage, change.passage.index
        if change.what == "begin":
            return [{"type": "content_block_start", "index": index, "content_block": self._empty(passage)}]
        if change.what == "end":
            signature = [_delta(index, {"type": "signature_delta", "signature": ""})]
            return [*(signature if passage.kind == "reasoning" else ()), {"type": "content_block_stop", "index": index}]
        if passage.kind == "text":
            return [_delta(index, {"type": "text_delta", "text": change.text})]
        if passage.kind == "call":
            return [_delta(index, {"type": "input_json_delta", "partial_json": change.text})]
        return [_delta(index, {"type": "thinking_delta", "thinking": change.text})] if self._shows_thinking else []

    def _empty(self, passage: Passage) -> dict[str, Any]:
        return self._content(Passage(passage.kind, passage.index, id=passage.id, name=passage.name))


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _encoded(events: list[dict[str, Any]]) -> bytes:
    return b"".join(sse.named_event(event["type"], event) for event in events)


def _tool_id(passage: Passage) -> str:
    return "toolu_" + passage.id.removeprefix("call_")


def _object(arguments: str) -> dict[str, Any]:
    """A call's arguments; of those that were cut off, what is there."""
    try:
        value = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
