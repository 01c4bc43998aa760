"""A conversation of another dialect, written down in chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from penstock.server.chat_body import ChatBody
from penstock.server.errors import invalid_body


class Script:
    """Systems in a row are one message, and so are assistants: a template wants them to take turns."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._names: dict[str, str] = {}  # of the functions called, by call

    def say(self, role: str, text: str, *, join: bool = False) -> None:
        """`join` puts a user's text to the user's message before it."""
        self._line(role, join or role in ("system", "assistant")).texts.append(text)

    def think(self, text: str) -> None:
        self._line("assistant").thoughts.append(text)

    def call(self, id: str, name: str, arguments: str) -> None:
        self._names[id] = name
        self._line("assistant").calls.append(
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        )

    def result(self, id: str, text: str) -> None:
        line = self._line("tool", join=False)
        line.texts.append(text)
        line.more = {"tool_call_id": id, "name": self._names.get(id)}

    def _line(self, role: str, join: bool = True) -> _Line:
        if not join or not self._lines or self._lines[-1].role != role:
            self._lines.append(_Line(role))
        return self._lines[-1]

    def messages(self) -> list[dict[str, Any]]:
        return [line.message() for line in self._lines]


@dataclass
class _Line:
    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, str | None] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": "\n".join(text for text in self.texts if text)}
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message | {name: value for name, value in self.more.items() if value is not None}


def chat_body(values: Mapping[str, Any]) -> ChatBody:
    """A chat body of translated values; what is wrong with them is the client's error."""
    try:
        return ChatBody.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        raise invalid_body(error) from None
