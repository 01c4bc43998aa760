"""Hermes and Qwen: <tool_call>, a JSON object, </tool_call>; any number of them, with text before and between."""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.text.events import Event, new_call_id
from penstock.text.markers import Markers, skip
from penstock.text.tools.call_object import CallObject
from penstock.text.tools.stream import Stream

_BEGIN, _END = Markers("<tool_call>"), Markers("</tool_call>")
_TAIL = re.compile(r"[\s}]*")  # a brace too many is a common slip


class HermesParser:
    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._stream = Stream(self._gap, new_id)
        self._object = CallObject(self._stream, sure=True)

    def push(self, text: str) -> list[Event]:
        return self._stream.push(text)

    def finish(self) -> list[Event]:
        return self._stream.finish()

    def _gap(self, text: str, at: int) -> int:
        """Space before a call is dropped, space before text is text."""
        end = skip(text, at)
        self._stream.hold(text[at:end])
        marker = _BEGIN.here(text, end)
        if marker == "":
            self._stream.text("")
            self._stream.step = self._text
        return self._opened(end, marker or "")

    def _text(self, text: str, at: int) -> int:
        end, marker = _BEGIN.seek(text, at)
        self._stream.text(text[at:end])
        return self._opened(end, marker)

    def _opened(self, at: int, marker: str) -> int:
        if marker:
            self._stream.hold(marker)
            self._object = CallObject(self._stream, sure=True)
            self._stream.step = self._call
        return at + len(marker)

    def _call(self, text: str, at: int) -> int:
        at = self._object.push(text, at)
        if self._object.begun and self._object.ended:
            self._stream.step = self._close
        elif self._object.ended:
            self._stream.text("")
            self._stream.step = self._text
        return at

    def _close(self, text: str, at: int) -> int:
        end = skip(text, at, _TAIL)
        marker = _END.here(text, end)
        if marker is None:
            return end
        self._stream.end()
        self._stream.step = self._gap
        return end + len(marker)
