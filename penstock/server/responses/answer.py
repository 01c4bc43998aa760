"""An answer as a response, whole or in events."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from penstock.server import sse
from penstock.server.context import new_id, now, shaped, shaped_whole
from penstock.server.conversation import Conversation
from penstock.server.errors import ApiError
from penstock.server.generation import Generation
from penstock.server.passages import Change, Passage, Passages
from penstock.server.responses.body import ResponsesBody
from penstock.server.responses.output import Event, Output

UNFINISHED = ("queued", "in_progress")
Keep = Callable[[dict[str, Any]], None]


class ResponseAnswer:
    """`keep` is given the response in the end, unless the client wants it forgotten."""

    def __init__(self, body: ResponsesBody, conversation: Conversation, generation: Generation, keep: Keep) -> None:
        self.body = body
        self.generation = generation
        self._keep = keep if body.store is not False else None
        self.passages = Passages(conversation)
        self._output = Output((body.top_logprobs or 0) if body.wants_logprobs else None)
        self._head = _head(body, conversation, generation)
        self._num_events = 0

    @property
    def id(self) -> str:
        id: str = self._head["id"]
        return id

    # whole

    async def whole(self) -> Any:
        async with contextlib.aclosing(self.passages.follow(self.generation)) as batches:
            async for _ in batches:
                pass
        self._say_something()
        return await shaped_whole(self.generation, self._ended)

    def _say_something(self) -> list[Change]:
        """An empty answer is an empty message."""
        if self.passages.all:
            return []
        passage = Passage("text", 0)
        self.passages.all.append(passage)
        return [Change("begin", passage), Change("end", passage)]

    @property
    def _status(self) -> str:
        return "incomplete" if self.passages.turn.finish_reason == "length" else "completed"

    def _ended(self) -> dict[str, Any]:
        last = len(self.passages.all) - 1
        items = [
            self._output.item(passage, self._status if passage.index == last else "completed")
            for passage in self.passages.all
        ]
        response = self._response(self._status, items)
        if self._keep is not None:
            self._keep(response)
        return response

    def _response(
        self, status: str, items: list[dict[str, Any]], error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        ends = status not in UNFINISHED
        return {
            **self._head,
            "status": status,
            "output": items,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "completed_at": time.time() if status == "completed" else None,
            "usage": self._usage() if ends else None,
            **(self.generation.relaxed if ends else {}),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.generation.usage
        return {
            "input_tokens": usage.num_prompt,
            "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
            "output_tokens": usage.num_output,
            "output_tokens_details": {"reasoning_tokens": self.passages.num_reasoning_tokens},
            "total_tokens": usage.num_prompt + usage.num_output,
        }

    # streamed

    async def events(self) -> AsyncGenerator[bytes, None]:
        begun = False
        async with contextlib.aclosing(self.passages.follow(self.generation)) as batches:
            async for changes in batches:
                told = await shaped(self._num_logprobs(changes), partial(self._chunk, changes, first=not begun))
                begun = True
                if told:
                    yield told
        yield await shaped(self.generation.num_logprobs, self._last)

    def _num_logprobs(self, changes: list[Change]) -> int:
        """In the events of some changes, at most: an end tells all of them again."""
        if any(change.what == "end" for change in changes):
            return self.generation.num_logprobs
        return sum(len(change.logprobs) for change in changes) * ((self.body.top_logprobs or 0) + 1)

    def _chunk(self, changes: list[Change], *, first: bool) -> bytes:
        return self._encoded([*(self._begun() if first else []), *self._told(changes)])

    def _last(self) -> bytes:
        events = self._told(self._say_something())
        return self._encoded([*events, {"type": f"response.{self._status}", "response": self._ended()}])

    def failed(self, error: ApiError) -> bytes:
        """What a stream that has begun says of a failure."""
        response = self.failure(error)
        return self._encoded(
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

    def failure(self, error: ApiError) -> dict[str, Any]:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        return self._response("failed", self._cut_off(), {"code": code, "message": error.message})

    def _cut_off(self) -> list[dict[str, Any]]:
        return [self._output.item(passage, "incomplete") for passage in self.passages.all]

    def _begun(self) -> list[Event]:
        response = self._response("in_progress", [])
        created = [] if self.body.background else [{"type": "response.created", "response": response}]
        return [*created, {"type": "response.in_progress", "response": response}]

    # in the background

    def so_far(self, status: str) -> dict[str, Any]:
        """The response before it has ended."""
        return self._response(status, [])

    def queued(self) -> bytes:
        """The first event of a background response, before any output."""
        response = self.so_far("queued")
        return self._encoded(
            [{"type": "response.created", "response": response}, {"type": "response.queued", "response": response}]
        )

    def cancelled(self) -> dict[str, Any]:
        return self._response("cancelled", self._cut_off())

    def _told(self, changes: list[Change]) -> list[Event]:
        """A passage that ends because another begins is complete; the last is as complete as the answer."""
        events: list[Event] = []
        for at, change in enumerate(changes):
            follows = any(later.what == "begin" for later in changes[at + 1 :])
            events += self._output.events(change, "completed" if follows else self._status)
        return events

    def _encoded(self, events: list[Event]) -> bytes:
        encoded = []
        for event in events:
            encoded.append(sse.named_event(event["type"], {**event, "sequence_number": self._num_events}))
            self._num_events += 1
        return b"".join(encoded)


def _head(body: ResponsesBody, conversation: Conversation, generation: Generation) -> dict[str, Any]:
    """What a response says again of the request."""
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
        "temperature": conversation.params.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": asked.get("tool_choice", "auto"),
        "tools": [tool.as_json() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": conversation.params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
