"""Finding the ids whose text contains a string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

SEPARATOR = b"\xff"            # no part of any text
MAX_KEPT = 64                  # strings whose ids are remembered


class TokenSearch:
    def __init__(self, spellings: Iterable[str | bytes]) -> None:
        """From the text of each id, in their order."""
        texts = [spelled if isinstance(spelled, bytes) else spelled.encode(errors="replace") for spelled in spellings]
        self._all = np.frombuffer(SEPARATOR.join([*texts, b""]), dtype=np.uint8)
        self._ends = np.cumsum([len(text) + 1 for text in texts])
        self._find = lru_cache(MAX_KEPT)(self._containing)

    def containing(self, strings: Sequence[str]) -> bytes:
        """A bit for each id whose text contains any of the strings, the lowest id first."""
        found = np.zeros(-(-len(self._ends) // 8), dtype=np.uint8)
        for text in strings:
            found |= self._find(text)
        return found.tobytes()

    def _containing(self, text: str) -> np.ndarray:
        wanted = text.encode(errors="replace")
        places = np.flatnonzero(self._all == wanted[0])
        for offset, byte in enumerate(wanted[1:], start=1):
            places = places[places + offset < len(self._all)]
            places = places[self._all[places + offset] == byte]
        ids = np.searchsorted(self._ends, places, side="right")
        found = np.zeros(len(self._ends), dtype=bool)
        found[ids] = True
        return np.packbits(found, bitorder="little")
