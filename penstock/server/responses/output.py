"""An answer's passages as the items of a response, and what happens to them as its events."""

from __future__ import annotations

from typing import Any

from penstock.server.context import new_id
from penstock.server.logprobs import chat_logprobs
from penstock.server.passages import Change, Passage

PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}
PARTS = {"text": "output_text", "reasoning": "reasoning_text"}

Event = dict[str, Any]


class Output:
    def __init__(self, num_top_logprobs: int | None) -> None:
        self._num_top = num_top_logprobs  # None: no log probabilities
        self._ids: dict[int, str] = {}

    def item(self, passage: Passage, status: str = "completed") -> dict[str, Any]:
        head = {"id": self._id(passage), "status": status}
        if passage.kind == "call":
            return {
                **head,
                "type": "function_call",
                "call_id": passage.id,
                "name": passage.name,
                "arguments": passage.text,
            }
        content = [] if status == "in_progress" else [self._part(passage)]
        if passage.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def events(self, change: Change, status: str) -> list[Event]:
        """`status` is that of a passage that ends."""
        if change.what == "begin":
            return self._begun(change.passage)
        if change.what == "end":
            return self._ended(change.passage, status)
        kind = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
        event = {
            "type": f"response.{kind[change.passage.kind]}.delta",
            **self._place(change.passage),
            "delta": change.text,
        }
        if change.passage.kind == "text":
            event["logprobs"] = [] if self._num_top is None else chat_logprobs(change.logprobs, self._num_top)
        return [event]

    def _begun(self, passage: Passage) -> list[Event]:
        empty = Passage(passage.kind, passage.index, id=passage.id, name=passage.name)
        events: list[Event] = [
            {
                "type": "response.output_item.added",
                "output_index": passage.index,
                "item": self.item(empty, "in_progress"),
            }
        ]
        if passage.kind != "call":
            events.append({"type": "response.content_part.added", **self._place(passage), "part": self._part(empty)})
        return events

    def _ended(self, passage: Passage, status: str) -> list[Event]:
        done: Event = {
            "type": "response.output_item.done",
            "output_index": passage.index,
            "item": self.item(passage, status),
        }
        place = self._place(passage)
        if passage.kind == "call":
            return [
                {
                    "type": "response.function_call_arguments.done",
                    **place,
                    "name": passage.name,
                    "arguments": passage.text,
                },
                done,
            ]
        part = self._part(passage)
        told = {"logprobs": part["logprobs"]} if passage.kind == "text" else {}
        return [
            {"type": f"response.{PARTS[passage.kind]}.done", **place, "text": passage.text, **told},
            {"type": "response.content_part.done", **place, "part": part},
            done,
        ]

    def _part(self, passage: Passage) -> dict[str, Any]:
        if passage.kind == "reasoning":
            return {"type": "reasoning_text", "text": passage.text}
        logprobs = [] if self._num_top is None else chat_logprobs(passage.logprobs, self._num_top)
        return {"type": "output_text", "text": passage.text, "annotations": [], "logprobs": logprobs}

    def _place(self, passage: Passage) -> dict[str, Any]:
        place = {"item_id": self._id(passage), "output_index": passage.index}
        return place if passage.kind == "call" else {**place, "content_index": 0}

    def _id(self, passage: Passage) -> str:
        return self._ids.setdefault(passage.index, new_id(PREFIXES[passage.kind]))
