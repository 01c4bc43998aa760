"""Repetition, frequency and presence penalties, in that order, with vLLM's meanings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.sampling.arrays import Array
from penstock.types import SamplingParams

FLOAT32_MAX = float(np.finfo(np.float32).max)


class TokenCounts:
    """How often each token occurs in a text that grows and shrinks at its end."""

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
        """The ids under `limit` that occur, and how often."""
        present = (self._counts > 0) & (self._ids < limit)
        return self._ids[present], self._counts[present]


class Penalties:
    """What one row's penalties need to know of its text; each text is counted only when a penalty looks at it."""

    def __init__(self, sampling: SamplingParams, tokens: Sequence[int], num_prompt: int) -> None:
        self.repetition = sampling.repetition_penalty
        self.frequency = sampling.frequency_penalty
        self.presence = sampling.presence_penalty
        self._everywhere = TokenCounts(tokens) if self.repetition != 1 else None
        self._generated = TokenCounts(tokens[num_prompt:]) if self.frequency or self.presence else None

    @property
    def active(self) -> bool:
        return self._everywhere is not None or self._generated is not None

    @property
    def strengths(self) -> tuple[float, float, float]:
        return self.repetition, self.frequency, self.presence

    def add(self, token: int) -> None:
        for counts in (self._everywhere, self._generated):
            if counts is not None:
                counts.add(token)

    def remove(self, token: int) -> None:
        for counts in (self._everywhere, self._generated):
            if counts is not None:
                counts.remove(token)

    def apply(self, logits: Array) -> None:
        """Change one row in place."""
        if self._everywhere is not None:
            ids, _ = self._everywhere.below(len(logits))
            values = logits[ids].astype(np.float64)
            with np.errstate(over="ignore"):
                values = np.where(values > 0, values / self.repetition, values * self.repetition)
            _store(logits, ids, values)
        if self._generated is not None:
            ids, counts = self._generated.below(len(logits))
            _store(logits, ids, logits[ids] - (self.frequency * counts + self.presence))


def _store(logits: Array, ids: Array, values: Array) -> None:
    """An impossible token stays impossible; every other stays finite however strong the penalty."""
    possible = logits[ids] > -np.inf
    logits[ids[possible]] = np.clip(values[possible], -FLOAT32_MAX, FLOAT32_MAX)
