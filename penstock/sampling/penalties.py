"""Repetition, frequency and presence penalties, in this order, as vLLM defines them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.sampling.logits import Array
from penstock.types import SamplingParams

FLOAT32_MAX = float(np.finfo(np.float32).max)


class TokenCounts:
    """Occurrences of each token in a text that grows and shrinks at its end."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._ids, self._counts = np.unique(np.asarray(tokens, dtype=np.int64), return_counts=True)
        self._slots = {token: slot for slot, token in enumerate(self._ids.tolist())}

    def add(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(max(64, slot), dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(max(64, slot), dtype=np.int64)))
        self._ids[slot] = token
        self._counts[slot] += 1

    def remove(self, token: int) -> None:
        self._counts[self._slots[token]] -= 1

    def below(self, limit: int) -> tuple[Array, Array]:
        """Return the ids below `limit` that occur, and their counts."""
        present = (self._counts > 0) & (self._ids < limit)
        return self._ids[present], self._counts[present]


class Penalties:
    """Token counts for one row's penalties, built only when needed. `tokens` is the row's text; with `repeat_last_n`
    only its last tokens count. Tokens appended to it are counted when the penalties are next applied."""

    def __init__(self, sampling: SamplingParams, tokens: Sequence[int], num_prompt: int) -> None:
        self._text, self._num_prompt = tokens, num_prompt
        self.window = None if sampling.repeat_last_n is None or sampling.repeat_last_n < 0 else sampling.repeat_last_n
        off = self.window == 0
        self.repetition = 1.0 if off else sampling.repetition_penalty
        self.frequency = 0.0 if off else sampling.frequency_penalty
        self.presence = 0.0 if off else sampling.presence_penalty
        first = self.first
        self._everywhere = TokenCounts(tokens[first:]) if self.repetition != 1 else None
        self._generated = TokenCounts(tokens[max(first, num_prompt) :]) if self.frequency or self.presence else None
        self._num_counted = len(tokens)

    @property
    def active(self) -> bool:
        return self._everywhere is not None or self._generated is not None

    @property
    def first(self) -> int:
        """Index of the first token that counts."""
        return 0 if self.window is None else max(0, len(self._text) - self.window)

    @property
    def strengths(self) -> tuple[float, float, float]:
        return self.repetition, self.frequency, self.presence

    def _catch_up(self) -> None:
        """Count the tokens appended to the text since the last time."""
        text, window = self._text, self.window
        for place in range(self._num_counted, len(text)):
            for counts in (self._everywhere, self._generated):
                if counts is not None:
                    counts.add(text[place])
            if window is not None and place >= window:
                for counts in self._counts_at(place - window):
                    counts.remove(text[place - window])
        self._num_counted = len(text)

    def remove(self, token: int) -> None:
        """Uncount a token removed from the text."""
        if self._num_counted <= len(self._text):
            return
        self._num_counted = len(self._text)
        for counts in (self._everywhere, self._generated):
            if counts is not None:
                counts.remove(token)
        if self.window is not None and len(self._text) >= self.window:
            for counts in self._counts_at(self.first):
                counts.add(self._text[self.first])

    def _counts_at(self, place: int) -> list[TokenCounts]:
        """Return the counts that a token at `place` belongs to."""
        asked = (self._everywhere, self._generated if place >= self._num_prompt else None)
        return [counts for counts in asked if counts is not None]

    def apply(self, logits: Array) -> None:
        """Penalise one row in place."""
        self._catch_up()
        if self._everywhere is not None:
            ids, _ = self._everywhere.below(len(logits))
            values = logits[ids].astype(np.float64)
            with np.errstate(over="ignore"):
                values = np.where(values > 0, values / self.repetition, values * self.repetition)
            store_finite(logits, ids, values)
        if self._generated is not None:
            ids, counts = self._generated.below(len(logits))
            store_finite(logits, ids, logits[ids] - (self.frequency * counts + self.presence))


def store_finite(logits: Array, ids: Array, values: Array) -> None:
    """Store `values` at `ids`; -inf stays -inf, everything else stays finite under any penalty."""
    possible = logits[ids] > -np.inf
    logits[ids[possible]] = np.clip(values[possible], -FLOAT32_MAX, FLOAT32_MAX)
