"""Llama 3: the answer is a JSON object with `name` and `parameters`, or several with semicolons between; the token
<|python_tag|> may stand before one, and after text it must."""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.text.events import Event, new_call_id
from penstock.text.markers import Markers, skip
from penstock.text.tools.call_object import CallObject
from penstock.text.tools.stream import Stream

_TAG = Markers("<|python_tag|>")
_BETWEEN = re.compile(r"[\s;}]*")  # a brace too many is a common slip


class LlamaJsonParser:
    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._stream = Stream(self._gap, new_id)
        self._object = CallObject(self._stream, sure=False)

    def push(self, text: str) -> list[Event]:
        return self._stream.push(text)

    def finish(self) -> list[Event]:
        return self._stream.finish(separators=";}")

    def _gap(self, text: str, at: int) -> int:
        end = skip(text, at, _BETWEEN) if self._stream.num_calls else skip(text, at)
        self._stream.hold(text[at:end])
        if text.startswith("{", end):
            return self._opened(end, sure=False)
        return self._tag(end, _TAG.here(text, end))

    def _text(self, text: str, at: int) -> int:
        end, marker = _TAG.seek(text, at)
        self._stream.text(text[at:end])
        return self._tag(end, marker or None)

    def _tag(self, at: int, marker: str | None) -> int:
        if marker:
            self._stream.hold(marker)
            self._stream.step = self._tagged
            return at + len(marker)
        if marker == "":
            self._stream.text("")
            self._stream.step = self._text
        return at

    def _tagged(self, text: str, at: int) -> int:
        end = skip(text, at)
        self._stream.hold(text[at:end])
        if text.startswith("{", end):
            return self._opened(end, sure=True)
        if end < len(text):
            self._stream.text("")
            self._stream.step = self._text
        return end

    def _opened(self, at: int, sure: bool) -> int:
        self._object = CallObject(self._stream, sure)
        self._stream.step = self._call
        return at

    def _call(self, text: str, at: int) -> int:
        at = self._object.push(text, at)
        if self._object.ended:
            self._stream.text("")
            self._stream.end()
            self._stream.step = self._gap if self._object.begun else self._text
        return at
