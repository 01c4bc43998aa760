"""A conversation of another dialect, written down in chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from penstock.server.chat_body import ChatBody
from penstock.server.errors import invalid_body


class Script:
    """Systems in a row are one message, and so are assistants: a template wants them to take turns."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}            # of the functions called, by call

    def say(self, role: str, text: str, *, join: bool = False) -> None:
        """`join` puts a user's text to the user's message before it."""
        last = self._last(role) if join or role in ("system", "assistant") else None
        if last is None:
            self.messages.append({"role": role, "content": text})
        else:
            last["content"] = f"{last['content']}\n{text}" if last["content"] else text

    def think(self, text: str) -> None:
        message = self._assistant()
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def call(self, id: str, name: str, arguments: str | dict[str, Any]) -> None:
        self._names[id] = name
        self._assistant().setdefault("tool_calls", []).append(
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def result(self, id: str, text: str) -> None:
        message = {"role": "tool", "tool_call_id": id, "content": text}
        if id in self._names:
            message["name"] = self._names[id]
        self.messages.append(message)

    def _assistant(self) -> dict[str, Any]:
        last = self._last("assistant")
        if last is None:
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        return last

    def _last(self, role: str) -> dict[str, Any] | None:
        return self.messages[-1] if self.messages and self.messages[-1]["role"] == role else None


def chat_body(values: Mapping[str, Any]) -> ChatBody:
    """A chat body of translated values; what is wrong with them is the client's error."""
    try:
        return ChatBody.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        raise invalid_body(error) from None
