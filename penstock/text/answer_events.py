"""Events of an answer (text, reasoning and tool calls), and the search for the markers between them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.host.ids import make_id


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    index: int  # of the call within the answer, from 0
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; all pieces of one index join to JSON."""

    index: int
    text: str


Event = TextDelta | ReasoningDelta | CallBegin | CallArguments


def new_call_id() -> str:
    return "call_" + make_id()


SPACE = re.compile(r"\s*")


class MarkerSearch:
    """A set of fixed strings to find."""

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._pattern = re.compile("|".join(map(re.escape, markers)))
        self._longest = max(map(len, markers))

    def seek(self, text: str, at: int) -> tuple[int, str]:
        """Return the position and text of the first marker from `at` on. Without one, the position where the end of
        the text may begin one (else the end), and ''."""
        found = self._pattern.search(text, at)
        if found:
            return found.start(), found.group()
        for place in range(max(at, len(text) - self._longest + 1), len(text)):
            if self._may_begin(text[place:]):
                return place, ""
        return len(text), ""

    def here(self, text: str, at: int) -> str | None:
        """Return the marker at `at`, '' if there is none, None if only more text can tell."""
        found = self._pattern.match(text, at)
        if found:
            return found.group()
        return None if self._may_begin(text[at : at + self._longest]) else ""

    def _may_begin(self, tail: str) -> bool:
        return any(marker.startswith(tail) for marker in self._markers)


def skip(text: str, at: int, pattern: re.Pattern[str] = SPACE) -> int:
    """Return the position after what `pattern` (whitespace by default) matches at `at`."""
    found = pattern.match(text, at)
    return found.end() if found else at
