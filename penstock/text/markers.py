"""Fixed strings in streamed text, found however the text is cut."""

from __future__ import annotations

import re

_SPACE = re.compile(r"\s*")


class Markers:
    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._pattern = re.compile("|".join(map(re.escape, markers)))
        self._longest = max(map(len, markers))

    def seek(self, text: str, at: int) -> tuple[int, str]:
        """Where the first marker from `at` on stands, and which it is; without one, where the end of the text may
        begin one (or the text ends), and ''."""
        found = self._pattern.search(text, at)
        if found:
            return found.start(), found.group()
        for place in range(max(at, len(text) - self._longest + 1), len(text)):
            if self._may_begin(text[place:]):
                return place, ""
        return len(text), ""

    def here(self, text: str, at: int) -> str | None:
        """The marker that stands at `at`, '' if none does, None if only more text can tell."""
        found = self._pattern.match(text, at)
        if found:
            return found.group()
        return None if self._may_begin(text[at : at + self._longest]) else ""

    def _may_begin(self, tail: str) -> bool:
        return any(marker.startswith(tail) for marker in self._markers)


def skip(text: str, at: int, pattern: re.Pattern[str] = _SPACE) -> int:
    """The place behind what the pattern, which may match nothing, matches at `at`; white space by default."""
    found = pattern.match(text, at)
    return found.end() if found else at
