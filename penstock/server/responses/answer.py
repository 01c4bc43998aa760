"""Format a response, as a whole or as events."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, cast

from penstock.server.common.chat_prompt import ChatPrompt
from penstock.server.common.message_builder import ItemChange, OutputItem, OutputItems
from penstock.server.generation import Generation
from penstock.server.http import sse
from penstock.server.http.context import format_whole, new_id, now, run_formatting
from penstock.server.http.errors import ApiError
from penstock.server.openai.logprobs import format_chat_logprobs
from penstock.server.responses.body import ResponsesBody

PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}
PARTS = {"text": "output_text", "reasoning": "reasoning_text"}
Event = dict[str, Any]
UNFINISHED = ("queued", "in_progress")
Keep = Callable[[dict[str, Any]], None]


class OutputEvents:
    """Formats items and events with stable item ids."""

    def __init__(self, num_top_logprobs: int | None) -> None:
        self._num_top = num_top_logprobs  # None: no logprobs
        self._ids: dict[int, str] = {}

    def format_item(self, output_item: OutputItem, status: str = "completed") -> dict[str, Any]:
        head = {"id": self._find_id(output_item), "status": status}
        if output_item.kind == "call":
            return {
                **head,
                "type": "function_call",
                "call_id": output_item.id,
                "name": output_item.name,
                "arguments": output_item.text,
            }
        content = [] if status == "in_progress" else [self._format_part(output_item)]
        if output_item.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def format_change(self, change: ItemChange, status: str) -> list[Event]:
        """Format a change as events; `status` is that of an item that ends."""
        if change.what == "begin":
            return self._format_begin(change.output_item)
        if change.what == "end":
            return self._format_end(change.output_item, status)
        kind = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
        event = {
            "type": f"response.{kind[change.output_item.kind]}.delta",
            **self._format_place(change.output_item),
            "delta": change.text,
        }
        if change.output_item.kind == "text":
            event["logprobs"] = [] if self._num_top is None else format_chat_logprobs(change.logprobs, self._num_top)
        return [event]

    def _format_begin(self, output_item: OutputItem) -> list[Event]:
        empty = OutputItem(output_item.kind, output_item.index, id=output_item.id, name=output_item.name)
        format_change: list[Event] = [
            {
                "type": "response.output_item.added",
                "output_index": output_item.index,
                "item": self.format_item(empty, "in_progress"),
            }
        ]
        if output_item.kind != "call":
            format_change.append(
                {
                    "type": "response.content_part.added",
                    **self._format_place(output_item),
                    "part": self._format_part(empty),
                }
            )
        return format_change

    def _format_end(self, output_item: OutputItem, status: str) -> list[Event]:
        done: Event = {
            "type": "response.output_item.done",
            "output_index": output_item.index,
            "item": self.format_item(output_item, status),
        }
        place = self._format_place(output_item)
        if output_item.kind == "call":
            return [
                {
                    "type": "response.function_call_arguments.done",
                    **place,
                    "name": output_item.name,
                    "arguments": output_item.text,
                },
                done,
            ]
        part = self._format_part(output_item)
        logprobs = {"logprobs": part["logprobs"]} if output_item.kind == "text" else {}
        return [
            {"type": f"response.{PARTS[output_item.kind]}.done", **place, "text": output_item.text, **logprobs},
            {"type": "response.content_part.done", **place, "part": part},
            done,
        ]

    def _format_part(self, output_item: OutputItem) -> dict[str, Any]:
        if output_item.kind == "reasoning":
            return {"type": "reasoning_text", "text": output_item.text}
        logprobs = [] if self._num_top is None else format_chat_logprobs(output_item.logprobs, self._num_top)
        return {"type": "output_text", "text": output_item.text, "annotations": [], "logprobs": logprobs}

    def _format_place(self, output_item: OutputItem) -> dict[str, Any]:
        place = {"item_id": self._find_id(output_item), "output_index": output_item.index}
        return place if output_item.kind == "call" else {**place, "content_index": 0}

    def _find_id(self, output_item: OutputItem) -> str:
        if output_item.index not in self._ids:
            self._ids[output_item.index] = new_id(PREFIXES[output_item.kind])
        return self._ids[output_item.index]


class ResponseAnswer:
    """One response, collected or streamed. `keep` stores it at the end, unless store is false."""

    def __init__(self, body: ResponsesBody, chat_prompt: ChatPrompt, generation: Generation, keep: Keep) -> None:
        self.body = body
        self.generation = generation
        self._keep = keep if body.store is not False else None
        self.output_items = OutputItems(chat_prompt)
        self._output = OutputEvents((body.top_logprobs or 0) if body.wants_logprobs else None)
        self._head = _make_head(body, chat_prompt, generation)
        self._num_events = 0

    @property
    def id(self) -> str:
        return cast(str, self._head["id"])

    async def collect(self) -> Any:
        async with contextlib.aclosing(self.output_items.follow(self.generation)) as batches:
            async for _ in batches:
                pass
        self._add_empty_item()
        return await format_whole(self.generation, self._finish)

    def _add_empty_item(self) -> list[ItemChange]:
        """Give an empty output an empty message."""
        if self.output_items.all:
            return []
        output_item = OutputItem("text", 0)
        self.output_items.all.append(output_item)
        return [ItemChange("begin", output_item), ItemChange("end", output_item)]

    @property
    def _status(self) -> str:
        return "incomplete" if self.output_items.builder.finish_reason == "length" else "completed"

    def _finish(self) -> dict[str, Any]:
        last = len(self.output_items.all) - 1
        items = [
            self._output.format_item(output_item, self._status if output_item.index == last else "completed")
            for output_item in self.output_items.all
        ]
        response = self.format(self._status, items)
        if self._keep is not None:
            self._keep(response)
        return response

    def format(self, status: str, items: list[dict[str, Any]], error: dict[str, Any] | None = None) -> dict[str, Any]:
        ends = status not in UNFINISHED
        return {
            **self._head,
            "status": status,
            "output": items,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "completed_at": time.time() if status == "completed" else None,
            "usage": self._format_usage() if ends else None,
            **(self.generation.relaxed | self.generation.ledger if ends else {}),
        }

    def _format_usage(self) -> dict[str, Any]:
        usage = self.generation.usage
        return {
            "input_tokens": usage.num_prompt,
            "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
            "output_tokens": usage.num_output,
            "output_tokens_details": {"reasoning_tokens": self.output_items.builder.num_reasoning_tokens},
            "total_tokens": usage.num_prompt + usage.num_output,
            **usage.energy,
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        begun = False
        async with contextlib.aclosing(self.output_items.follow(self.generation)) as batches:
            async for changes in batches:
                chunk = await run_formatting(
                    self._count_logprobs(changes), partial(self._encode_changes, changes, first=not begun)
                )
                begun = True
                if chunk:
                    yield chunk
        yield await run_formatting(self.generation.num_logprobs, self._encode_last)

    def _count_logprobs(self, changes: list[ItemChange]) -> int:
        """Bound the logprobs in the events of `changes`: an end repeats all of them."""
        if any(change.what == "end" for change in changes):
            return self.generation.num_logprobs
        return sum(len(change.logprobs) for change in changes) * ((self.body.top_logprobs or 0) + 1)

    def _encode_changes(self, changes: list[ItemChange], *, first: bool) -> bytes:
        return self._encode([*(self._format_start() if first else []), *self._format_changes(changes)])

    def _encode_last(self) -> bytes:
        events = self._format_changes(self._add_empty_item())
        return self._encode([*events, {"type": f"response.{self._status}", "response": self._finish()}])

    def encode_failure(self, error: ApiError) -> bytes:
        """Encode the events that end a stream that failed."""
        response = self.format_failure(error)
        return self._encode(
            [
                {
                    "type": "error",
                    "code": error.code or response["error"]["code"],
                    "message": error.message,
                    "param": error.param,
                },
                {"type": "response.failed", "response": response},
            ]
        )

    def format_failure(self, error: ApiError) -> dict[str, Any]:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        return self.format_partial("failed", {"code": code, "message": error.message})

    def format_partial(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Format a response that was cut short, with its items so far."""
        items = [self._output.format_item(output_item, "incomplete") for output_item in self.output_items.all]
        return self.format(status, items, error)

    def _format_start(self) -> list[Event]:
        response = self.format("in_progress", [])
        created = [] if self.body.background else [{"type": "response.created", "response": response}]
        return [*created, {"type": "response.in_progress", "response": response}]

    def encode_queued(self) -> bytes:
        """Encode the first events of a background response, before any output."""
        response = self.format("queued", [])
        return self._encode(
            [{"type": "response.created", "response": response}, {"type": "response.queued", "response": response}]
        )

    def _format_changes(self, changes: list[ItemChange]) -> list[Event]:
        """Format changes; an item followed by another is complete, the last one has the response's status."""
        events: list[Event] = []
        for at, change in enumerate(changes):
            follows = any(later.what == "begin" for later in changes[at + 1 :])
            events += self._output.format_change(change, "completed" if follows else self._status)
        return events

    def _encode(self, events: list[Event]) -> bytes:
        encoded = []
        for event in events:
            encoded.append(sse.named_event(event["type"], {**event, "sequence_number": self._num_events}))
            self._num_events += 1
        return b"".join(encoded)


def _make_head(body: ResponsesBody, chat_prompt: ChatPrompt, generation: Generation) -> dict[str, Any]:
    asked = body.model_dump(include={"tool_choice", "text", "reasoning"}, by_alias=True, exclude_none=True)
    text = asked.get("text", {})
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": now(),
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model or generation.model.name,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None, **asked.get("reasoning", {})},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": chat_prompt.params.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": asked.get("tool_choice", "auto"),
        "tools": [tool.as_json() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": chat_prompt.params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
