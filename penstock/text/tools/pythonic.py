"""Llama 3.2 and 4: the answer is a Python list of calls with keyword arguments, [weather(city="Oslo", days=3)]."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from penstock.text.events import Event, new_call_id
from penstock.text.markers import Markers, skip
from penstock.text.tools.literals import ValueScanner, to_json
from penstock.text.tools.stream import Stream

_BEGIN = Markers("<|python_start|>", "<|python_tag|>")
_TAGS = Markers("<|python_start|>", "<|python_tag|>", "<|python_end|>")
_NAME = re.compile(r"[\w.-]*")
_BETWEEN = re.compile(r"[\s,]*")


class PythonicParser:
    """A call begins with its first complete argument, or at its closing bracket; each argument is one piece of JSON."""

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._stream = Stream(self._gap, new_id)
        self._name: list[str] = []
        self._key: list[str] = []
        self._value: list[str] = []
        self._scanner = ValueScanner()
        self._before = 0  # calls before this list

    def push(self, text: str) -> list[Event]:
        return self._stream.push(text)

    def finish(self) -> list[Event]:
        return self._stream.finish(separators=",")

    def _gap(self, text: str, at: int) -> int:
        end = skip(text, at)
        self._stream.hold(text[at:end])
        if text.startswith("[", end):
            self._stream.hold("[")
            self._before = self._stream.num_calls
            self._stream.step = self._item
            return end + 1
        marker = _TAGS.here(text, end)
        if marker == "" or marker == "<|python_end|>" and not self._stream.num_calls:
            return self._no_call(end)
        self._stream.hold(marker or "")
        if marker == "<|python_end|>":
            self._stream.drop()
        return end + len(marker or "")

    def _text(self, text: str, at: int) -> int:
        end, marker = _BEGIN.seek(text, at)
        self._stream.text(text[at:end])
        if marker:
            self._stream.hold(marker)
            self._stream.step = self._gap
        return end + len(marker)

    def _no_call(self, at: int) -> int:
        self._stream.text("")
        self._stream.end()
        self._stream.step = self._text
        return at

    def _item(self, text: str, at: int) -> int:
        end = skip(text, at, _BETWEEN)
        self._stream.hold(text[at:end])
        if end == len(text):
            return end
        if text[end] == "]" and self._stream.num_calls > self._before:
            self._stream.drop()
            self._stream.step = self._gap
            return end + 1
        if not (text[end].isalpha() or text[end] == "_"):
            return self._no_call(end)
        self._name.clear()
        self._stream.step = self._read_name
        return end

    def _read_name(self, text: str, at: int) -> int:
        end = skip(text, at, _NAME)
        self._name.append(text[at:end])
        self._stream.hold(text[at:end])
        if end == len(text):
            return end
        if text[end] != "(":
            return self._no_call(end)
        self._stream.hold("(")
        self._stream.step = self._argument
        return end + 1

    def _argument(self, text: str, at: int) -> int:
        end = skip(text, at, _BETWEEN)
        self._stream.hold(text[at:end])
        if end == len(text):
            return end
        if text[end] == ")":
            self._close()
            return end + 1
        self._key.clear()
        self._stream.step = self._read_key
        return end

    def _read_key(self, text: str, at: int) -> int:
        end = skip(text, at, _NAME)
        self._key.append(text[at:end])
        self._stream.hold(text[at:end])
        if end == len(text):
            return end
        if not any(self._key):
            return self._no_call(end)
        self._stream.step = self._equals
        return end

    def _equals(self, text: str, at: int) -> int:
        end = skip(text, at)
        self._stream.hold(text[at:end])
        if end == len(text):
            return end
        if text[end] != "=":
            return self._no_call(end)
        self._stream.hold("=")
        self._scanner = ValueScanner()
        self._value.clear()
        self._stream.step = self._read_value
        return end + 1

    def _read_value(self, text: str, at: int) -> int:
        end = self._scanner.push(text, at)
        self._value.append(text[at:end])
        self._stream.hold(text[at:end])
        if not self._scanner.done:
            return end
        try:
            value = to_json("".join(self._value))
        except ValueError:
            return self._no_call(end)
        self._emit(json.dumps("".join(self._key), ensure_ascii=False) + ": " + value)
        self._stream.step = self._argument
        return end

    def _emit(self, item: str) -> None:
        if self._stream.in_call:
            self._stream.arguments(", " + item)
        else:
            self._stream.begin("".join(self._name))
            self._stream.arguments("{" + item)

    def _close(self) -> None:
        if self._stream.in_call:
            self._stream.arguments("}")
        else:
            self._stream.begin("".join(self._name))
            self._stream.arguments("{}")
        self._stream.end()
        self._stream.step = self._item
