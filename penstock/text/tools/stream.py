"""What all tool parsers share: text goes to the current step, events come out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from penstock.text.events import CallArguments, CallBegin, Event, Text

Step = Callable[[str, int], int]


class Stream:
    """A step takes the text and a place in it, and returns the place behind what it consumed. One that consumes
    nothing and leaves `step` as it is waits for more text; it must not leave more than a marker's beginning, as the
    rest is read again with the next push.

    Text that may become a call is held: a call that begins drops it, text that follows brings it out.
    """

    def __init__(self, step: Step, new_id: Callable[[], str]) -> None:
        self.step = step
        self.num_calls = 0
        self.in_call = False
        self._new_id = new_id
        self._events: list[Event] = []
        self._held: list[str] = []
        self._rest = ""

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

    def finish(self, separators: str = "") -> list[Event]:
        """The held text, once no more will come; behind a call, space and separators are nothing to show."""
        self.hold(self._rest)
        self._rest = ""
        if self.num_calls and all(char.isspace() or char in separators for part in self._held for char in part):
            self.drop()
        self.text("")
        return self._take()

    def hold(self, text: str) -> None:
        """Outside a call only: inside, what is no argument is form."""
        if text and not self.in_call:
            self._held.append(text)

    def drop(self) -> None:
        self._held.clear()

    def text(self, text: str) -> None:
        whole = "".join([*self._held, text])
        self._held.clear()
        if whole:
            self._events.append(Text(whole))

    def begin(self, name: str) -> None:
        self.drop()
        self.in_call = True
        self._events.append(CallBegin(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self.num_calls - 1, text))

    def end(self) -> None:
        self.in_call = False

    def _take(self) -> list[Event]:
        """The new events, neighbours of one kind joined."""
        events: list[Event] = []
        for (kind, index), group in groupby(self._events, lambda event: (type(event), getattr(event, "index", 0))):
            if kind is CallBegin:
                events += group
                continue
            text = "".join(event.text for event in group if not isinstance(event, CallBegin))
            events.append(CallArguments(index, text) if kind is CallArguments else Text(text))
        self._events.clear()
        return events
