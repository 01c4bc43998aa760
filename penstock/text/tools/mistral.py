"""Mistral: [TOOL_CALLS] and a JSON array of calls, or, newer, [TOOL_CALLS] before each call's name and arguments, with
[ARGS], and sometimes [CALL_ID] and an id, between them."""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.text.events import Event, new_call_id
from penstock.text.markers import Markers, skip
from penstock.text.tools.arguments import Arguments
from penstock.text.tools.call_object import CallObject
from penstock.text.tools.stream import Stream

_BEGIN, _INNER = Markers("[TOOL_CALLS]"), Markers("[ARGS]", "[CALL_ID]")
_NAME = re.compile(r"[\w.-]*")
_BETWEEN = re.compile(r"[\s,]*")


class MistralParser:
    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._stream = Stream(self._gap, new_id)
        self._object = CallObject(self._stream, sure=True)
        self._arguments = Arguments()
        self._name: list[str] = []
        self._in_array = False
        self._before = 0  # calls before this array

    def push(self, text: str) -> list[Event]:
        return self._stream.push(text)

    def finish(self) -> list[Event]:
        return self._stream.finish(separators=",")

    def _gap(self, text: str, at: int) -> int:
        """Space before a call is dropped, space before text is text."""
        end = skip(text, at)
        self._stream.hold(text[at:end])
        marker = _BEGIN.here(text, end)
        return self._no_call(end) if marker == "" else self._marked(end, marker or "")

    def _text(self, text: str, at: int) -> int:
        end, marker = _BEGIN.seek(text, at)
        self._stream.text(text[at:end])
        return self._marked(end, marker)

    def _marked(self, at: int, marker: str) -> int:
        if marker:
            self._stream.hold(marker)
            self._stream.step = self._form
        return at + len(marker)

    def _no_call(self, at: int) -> int:
        self._stream.text("")
        self._stream.step = self._text
        return at

    def _form(self, text: str, at: int) -> int:
        """What follows the marker: an array, one object, or a name."""
        end = skip(text, at)
        self._stream.hold(text[at:end])
        if end == len(text):
            return end
        self._in_array = text[end] == "["
        self._before = self._stream.num_calls
        self._name.clear()
        if text[end] == "{":
            return self._opened(end)
        if self._in_array:
            self._stream.hold("[")
            self._stream.step = self._item
            return end + 1
        self._stream.step = self._named
        return end

    def _item(self, text: str, at: int) -> int:
        end = skip(text, at, _BETWEEN)
        self._stream.hold(text[at:end])
        if end == len(text):
            return end
        if text[end] == "{":
            return self._opened(end)
        if text[end] != "]" or self._stream.num_calls == self._before:
            return self._no_call(end)
        self._stream.drop()
        self._stream.step = self._gap
        return end + 1

    def _opened(self, at: int) -> int:
        self._object = CallObject(self._stream, sure=True)
        self._stream.step = self._call
        return at

    def _call(self, text: str, at: int) -> int:
        at = self._object.push(text, at)
        if not self._object.ended:
            return at
        if not self._object.begun:
            return self._no_call(at)
        self._stream.end()
        self._stream.step = self._item if self._in_array else self._gap
        return at

    def _named(self, text: str, at: int) -> int:
        end = skip(text, at, _NAME)
        self._stream.hold(text[at:end])
        self._name.append(text[at:end])
        if end == len(text):
            return end
        if not any(self._name):
            return self._no_call(end)
        self._stream.step = self._name_end
        return end

    def _name_end(self, text: str, at: int) -> int:
        end = skip(text, at)
        self._stream.hold(text[at:end])
        if end == len(text):
            return end
        if text[end] == "{":
            self._stream.begin("".join(self._name))
            self._arguments = Arguments()
            self._stream.step = self._read_arguments
            return end
        marker = _INNER.here(text, end)
        if marker == "":
            return self._no_call(end)
        self._stream.hold(marker or "")
        if marker == "[CALL_ID]":
            self._stream.step = self._call_id
        return end + len(marker or "")

    def _call_id(self, text: str, at: int) -> int:
        end = skip(text, at, _NAME)
        self._stream.hold(text[at:end])
        if end < len(text):
            self._stream.step = self._name_end
        return end

    def _read_arguments(self, text: str, at: int) -> int:
        end = self._arguments.push(text, at)
        self._stream.arguments(self._arguments.take())
        if self._arguments.done:
            self._stream.end()
            self._stream.step = self._gap
        return end
