"""Base class of the tool parsers: streamed text in, events out."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import groupby

from penstock.text.answer_events import (
    SPACE,
    CallArguments,
    CallBegin,
    Event,
    MarkerSearch,
    TextDelta,
    new_call_id,
    skip,
)

Step = Callable[[str, int], int]
BETWEEN = re.compile(r"[\s,]*")
NAME = re.compile(r"[\w.-]*")


class StreamParser(ABC):
    """Feeds text to the current `step` and collects events.

    A step takes the text and a position, and returns the position after what it consumed. One that consumes nothing
    and keeps `step` waits for more text; it may leave no more than a prefix of a marker, since that is read again.

    Text that may become a call is held: a call drops it, text after it releases it.
    """

    markers: MarkerSearch  # before a call
    separators = ""  # between calls, dropped at the end of the answer

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self.step: Step = self._gap
        self.num_calls, self.in_call = 0, False
        self._new_id = new_id
        self._events: list[Event] = []
        self._held: list[str] = []
        self._rest = ""

    def _gap(self, text: str, at: int) -> int:
        """Read before the first call and between calls: whitespace before a call is dropped, before text it is text."""
        end = self.skip(text, at)
        marker = self.markers.here(text, end)
        return self.give_up(end) if marker == "" else self._enter(end, marker or "")

    def _text(self, text: str, at: int) -> int:
        """Read text up to a marker."""
        end, marker = self.markers.seek(text, at)
        self.text(text[at:end])
        return self._enter(end, marker)

    def _enter(self, at: int, marker: str) -> int:
        if marker:
            self.hold(marker)
            self.step = self._after_marker
        return at + len(marker)

    @abstractmethod
    def _after_marker(self, text: str, at: int) -> int:
        """Read what follows a marker."""

    def push(self, text: str) -> list[Event]:
        text, at = self._rest + text, 0
        while at < len(text):
            step = self.step
            end = step(text, at)
            if end == at and self.step == step:
                break
            at = end
        self._rest = text[at:]
        return self._take()

    def finish(self) -> list[Event]:
        """Release the held text at the end of the answer; whitespace and separators after a call are dropped."""
        self.hold(self._rest)
        self._rest = ""
        if self.num_calls and all(char.isspace() or char in self.separators for part in self._held for char in part):
            self.drop()
        self.text("")
        return self._take()

    def hold(self, text: str) -> None:
        """Hold text outside a call; inside, anything but arguments is syntax."""
        if text and not self.in_call:
            self._held.append(text)

    def skip(self, text: str, at: int, pattern: re.Pattern[str] = SPACE) -> int:
        """Hold what `pattern` matches at `at`; return the position after it."""
        end = skip(text, at, pattern)
        self.hold(text[at:end])
        return end

    def drop(self) -> None:
        self._held.clear()

    def text(self, text: str) -> None:
        whole = "".join([*self._held, text])
        self._held.clear()
        if whole:
            self._events.append(TextDelta(whole))

    def give_up(self, at: int) -> int:
        """Release the held text: it is not a call."""
        self.text("")
        self.end(self._text)
        return at

    def begin(self, name: str) -> None:
        self.drop()
        self.in_call = True
        self._events.append(CallBegin(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self.num_calls - 1, text))

    def end(self, step: Step) -> None:
        """End the call and go on with `step`."""
        self.in_call, self.step = False, step

    def close_list(self, at: int) -> int:
        """Skip the bracket that closes a list of calls."""
        self.drop()
        self.step = self._gap
        return at + 1

    def _take(self) -> list[Event]:
        """Return the new events, neighbours of one kind joined."""
        events: list[Event] = []
        for (kind, index), group in groupby(self._events, lambda event: (type(event), getattr(event, "index", 0))):
            if kind is CallBegin:
                events += group
                continue
            text = "".join(event.text for event in group if not isinstance(event, CallBegin))
            events.append(CallArguments(index, text) if kind is CallArguments else TextDelta(text))
        self._events.clear()
        return events
