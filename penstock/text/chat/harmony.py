"""Split answers in gpt-oss's harmony form: messages on channels, each with a header.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`: analysis is reasoning, a message
to `functions.NAME` is a call, anything else is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.text.answer_events import (
    CallArguments,
    CallBegin,
    Event,
    MarkerSearch,
    ReasoningDelta,
    TextDelta,
    new_call_id,
)

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
_HEADERS = ("<|start|>", "<|channel|>", "<|constrain|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MARKS = MarkerSearch(*_HEADERS, "<|message|>", *_ENDS)
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonySplitter:
    """Splits streamed text into reasoning, calls and text; the sums do not depend on how the stream is cut.

    `inside`: the prompt opened the analysis. Text without a header is text; a header that never ends is dropped.
    """

    def __init__(self, inside: bool = False, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._make: Callable[[str], Event] = ReasoningDelta if inside else TextDelta
        self._header: list[str] | None = None
        self._num_calls = 0
        self._rest = ""
        self._events: list[Event] = []

    @property
    def is_inside(self) -> bool:
        """True if the text so far ends in reasoning."""
        return self._make is ReasoningDelta

    def push(self, text: str) -> list[Event]:
        text, at = self._rest + text, 0
        while at < len(text):
            end, mark = _MARKS.seek(text, at)
            self._add(text[at:end])
            at = end + len(mark)
            if not mark:
                break
            self._turn(mark)
        self._rest = text[at:]
        return self._take()

    def finish(self) -> list[Event]:
        """Return what was held, at the end."""
        self._add(self._rest)
        self._rest = ""
        return self._take()

    def _turn(self, mark: str) -> None:
        if mark in _HEADERS:
            self._header = [*(self._header or ()), mark]
        elif mark == "<|message|>":
            self._open("".join(self._header or ()))
            self._header = None
        else:
            self._header, self._make = None, TextDelta

    def _open(self, header: str) -> None:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is not None:
            index = self._num_calls
            self._events.append(CallBegin(index, self._new_id(), recipient[1]))
            self._num_calls += 1
            self._make = lambda text: CallArguments(index, text)
        else:
            self._make = ReasoningDelta if channel is not None and channel[1] == "analysis" else TextDelta

    def _add(self, text: str) -> None:
        if self._header is not None:
            self._header.append(text)
        elif text:
            self._events.append(self._make(text))

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events
