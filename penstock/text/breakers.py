"""Finding the ids whose text contains a string."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate

SEPARATOR = b"\xff"  # no part of any text
MAX_KEPT = 64  # strings, and lists of them, whose ids are remembered


class TokenSearch:
    def __init__(self, spellings: Iterable[str | bytes]) -> None:
        """From the text of each id, in their order."""
        texts = [spelled if isinstance(spelled, bytes) else spelled.encode(errors="replace") for spelled in spellings]
        self._all = SEPARATOR.join([*texts, b""])
        self._ends = list(accumulate(len(text) + 1 for text in texts))
        self._find = lru_cache(MAX_KEPT)(self._containing)
        self._find_any = lru_cache(MAX_KEPT)(self._containing_any)

    def containing(self, strings: Sequence[str]) -> bytes:
        """A bit for each id whose text contains any of the strings, the lowest id first; the same object for the same
        strings, as many requests may wait with it."""
        return self._find_any(tuple(strings))

    def _containing_any(self, strings: tuple[str, ...]) -> bytes:
        found = 0
        for text in strings:
            found |= self._find(text)
        return found.to_bytes(-(-len(self._ends) // 8), "little")

    def _containing(self, text: str) -> int:
        wanted = text.encode(errors="replace")
        found = bytearray(-(-len(self._ends) // 8))
        at = self._all.find(wanted)
        while at >= 0:
            id = bisect_right(self._ends, at)
            found[id // 8] |= 1 << id % 8
            at = self._all.find(wanted, self._ends[id])
        return int.from_bytes(found, "little")
