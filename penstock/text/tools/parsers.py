"""The tool parsers by name, and which one a chat template needs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Protocol

from penstock.text.answer_events import SPACE, Event, MarkerSearch, new_call_id, skip
from penstock.text.chat.harmony import HarmonySplitter
from penstock.text.tools.call_object import Arguments, CallObject
from penstock.text.tools.literals import ValueScanner, to_json
from penstock.text.tools.stream_parser import BETWEEN, NAME, Step, StreamParser

_END = MarkerSearch("</tool_call>")
_TAIL = re.compile(r"[\s}]*")  # models often write a brace too many


class HermesParser(StreamParser):
    markers = MarkerSearch("<tool_call>")

    def _after_marker(self, text: str, at: int) -> int:
        self._object = CallObject(self, sure=True)
        self.step = self._call
        return at

    def _call(self, text: str, at: int) -> int:
        at = self._object.push(text, at)
        if self._object.ended and not self._object.begun:
            return self.give_up(at)
        if self._object.ended:
            self.step = self._close
        return at

    def _close(self, text: str, at: int) -> int:
        end = skip(text, at, _TAIL)
        marker = _END.here(text, end)
        if marker is None:
            return end
        self.end(self._gap)
        return end + len(marker)


_BETWEEN = re.compile(r"[\s;}]*")  # models often write a brace too many


class LlamaJsonParser(StreamParser):
    markers = MarkerSearch("<|python_tag|>")
    separators = ";}"

    def _gap(self, text: str, at: int) -> int:
        end = self.skip(text, at, _BETWEEN if self.num_calls else SPACE)
        return self._open(end, sure=False) if text.startswith("{", end) else super()._gap(text, end)

    def _after_marker(self, text: str, at: int) -> int:
        end = self.skip(text, at)
        if text.startswith("{", end):
            return self._open(end, sure=True)
        return self.give_up(end) if end < len(text) else end

    def _open(self, at: int, sure: bool) -> int:
        self._object = CallObject(self, sure)
        self.step = self._call
        return at

    def _call(self, text: str, at: int) -> int:
        at = self._object.push(text, at)
        if self._object.ended:
            self.give_up(at)
            self.step = self._gap if self._object.begun else self._text
        return at


_INNER = MarkerSearch("[ARGS]", "[CALL_ID]")


class MistralParser(StreamParser):
    markers = MarkerSearch("[TOOL_CALLS]")
    separators = ","

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(new_id)
        self._name: list[str] = []
        self._in_array = False
        self._before = 0  # calls before this array

    def _after_marker(self, text: str, at: int) -> int:
        """Read an array, one object, or a name."""
        end = self.skip(text, at)
        if end == len(text):
            return end
        self._in_array = text[end] == "["
        self._before = self.num_calls
        self._name.clear()
        if text[end] == "{":
            return self._open_object(end)
        if self._in_array:
            self.hold("[")
            self.step = self._item
            return end + 1
        self.step = self._read_name
        return end

    def _item(self, text: str, at: int) -> int:
        end = self.skip(text, at, BETWEEN)
        if end == len(text):
            return end
        if text[end] == "{":
            return self._open_object(end)
        return self.give_up(end) if text[end] != "]" or self.num_calls == self._before else self.close_list(end)

    def _open_object(self, at: int) -> int:
        self._object = CallObject(self, sure=True)
        self.step = self._call
        return at

    def _call(self, text: str, at: int) -> int:
        at = self._object.push(text, at)
        if not self._object.ended:
            return at
        if not self._object.begun:
            return self.give_up(at)
        self.end(self._item if self._in_array else self._gap)
        return at

    def _read_name(self, text: str, at: int) -> int:
        end = self.skip(text, at, NAME)
        self._name.append(text[at:end])
        if end == len(text):
            return end
        if not any(self._name):
            return self.give_up(end)
        self.step = self._name_end
        return end

    def _name_end(self, text: str, at: int) -> int:
        end = self.skip(text, at)
        if end == len(text):
            return end
        if text[end] == "{":
            self.begin("".join(self._name))
            self._arguments = Arguments()
            self.step = self._read_arguments
            return end
        marker = _INNER.here(text, end)
        if marker == "":
            return self.give_up(end)
        self.hold(marker or "")
        if marker == "[CALL_ID]":
            self.step = self._call_id
        return end + len(marker or "")

    def _call_id(self, text: str, at: int) -> int:
        end = self.skip(text, at, NAME)
        if end < len(text):
            self.step = self._name_end
        return end

    def _read_arguments(self, text: str, at: int) -> int:
        end = self._arguments.push(text, at)
        self.arguments(self._arguments.take())
        if self._arguments.done:
            self.end(self._gap)
        return end


_TAGS = MarkerSearch("<|python_start|>", "<|python_tag|>", "<|python_end|>")


class PythonicParser(StreamParser):
    """A call begins with its first complete argument, or at its closing bracket; each argument is one JSON piece."""

    markers = MarkerSearch("<|python_start|>", "<|python_tag|>")
    separators = ","

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(new_id)
        self._name: list[str] = []
        self._key: list[str] = []
        self._value: list[str] = []
        self._before = 0  # calls before this list

    def _gap(self, text: str, at: int) -> int:
        end = self.skip(text, at)
        if text.startswith("[", end):
            self.hold("[")
            self._before = self.num_calls
            self.step = self._item
            return end + 1
        marker = _TAGS.here(text, end)
        if marker == "" or marker == "<|python_end|>" and not self.num_calls:
            return self.give_up(end)
        self.hold(marker or "")
        if marker == "<|python_end|>":
            self.drop()
        return end + len(marker or "")

    _after_marker = _gap

    def _item(self, text: str, at: int) -> int:
        end = self.skip(text, at, BETWEEN)
        if end == len(text):
            return end
        if text[end] == "]" and self.num_calls > self._before:
            return self.close_list(end)
        if not (text[end].isalpha() or text[end] == "_"):
            return self.give_up(end)
        self._name.clear()
        self.step = self._read_name
        return end

    def _read_name(self, text: str, at: int) -> int:
        end = self.skip(text, at, NAME)
        self._name.append(text[at:end])
        return end if end == len(text) else self._expect("(", self._argument, text, end)

    def _expect(self, mark: str, step: Step, text: str, at: int) -> int:
        if text[at] != mark:
            return self.give_up(at)
        self.hold(mark)
        self.step = step
        return at + 1

    def _argument(self, text: str, at: int) -> int:
        end = self.skip(text, at, BETWEEN)
        if end == len(text):
            return end
        if text[end] == ")":
            self._emit("}", "{}")
            self.end(self._item)
            return end + 1
        self._key.clear()
        self.step = self._read_key
        return end

    def _read_key(self, text: str, at: int) -> int:
        end = self.skip(text, at, NAME)
        self._key.append(text[at:end])
        if end == len(text):
            return end
        if not any(self._key):
            return self.give_up(end)
        self.step = self._equals
        return end

    def _equals(self, text: str, at: int) -> int:
        end = self.skip(text, at)
        self._scanner = ValueScanner()
        self._value.clear()
        return end if end == len(text) else self._expect("=", self._read_value, text, end)

    def _read_value(self, text: str, at: int) -> int:
        end = self._scanner.push(text, at)
        self._value.append(text[at:end])
        self.hold(text[at:end])
        if not self._scanner.done:
            return end
        try:
            item = json.dumps("".join(self._key), ensure_ascii=False) + ": " + to_json("".join(self._value))
        except ValueError:
            return self.give_up(end)
        self._emit(", " + item, "{" + item)
        self.step = self._argument
        return end

    def _emit(self, more: str, first: str) -> None:
        """Emit `more` arguments, or begin the call with `first`."""
        if self.in_call:
            self.arguments(more)
        else:
            self.begin("".join(self._name))
            self.arguments(first)


class ToolParser(Protocol):
    """Streamed text in, events out; their sum does not depend on the cuts. Never raises: a malformed call keeps what
    was emitted; if nothing was, it is text."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


TOOL_PARSERS: dict[str, Callable[..., ToolParser]] = {  # named as in vLLM
    "hermes": HermesParser,
    "llama3_json": LlamaJsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "openai": lambda new_id=new_call_id: HarmonySplitter(new_id=new_id),
}

_MARKS = (  # in this order: Llama 4's templates name the JSON form too
    ("<|channel|>analysis", "openai"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters"', "llama3_json"),
)


def detect_parser(chat_template: str | None) -> str:
    """Return the parser of the template's call syntax; Hermes, which `describe` teaches, by default."""
    return next((name for mark, name in _MARKS if mark in (chat_template or "")), "hermes")
