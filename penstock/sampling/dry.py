"""DRY: a token that would go on with a repetition is the less likely the longer that repetition is already.

The definition is llama.cpp's. At every earlier place the text may have read as it ends now: the token that followed
loses multiplier * base ** (length - allowed), for the longest such end. No repetition reaches back past a breaker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from penstock.sampling.arrays import Array
from penstock.sampling.penalties import store
from penstock.types import MAX_DRY_LENGTH, MAX_LOOKBACK, SamplingParams

LARGEST_LOG = 88.7228391  # of a float32


def most_repeated(base: float, allowed: int) -> int:
    """The length from which on repetitions all lose the same: larger powers would not be numbers."""
    grows = int(LARGEST_LOG / math.log(base)) if base > 1.000001 else 0
    return min(MAX_DRY_LENGTH, allowed + grows)


def breaking(bits: bytes, size: int) -> Array:
    """[size] bool of a request's `dry_breakers`."""
    known = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")[:size].astype(bool)
    return np.concatenate((known, np.zeros(size - len(known), dtype=bool)))


@lru_cache(maxsize=4)
def count_runs(text: bytes, most: int) -> Array:
    """Count by distance how many tokens are those at the end of a text of int64, up to `most`. Siblings ask for their
    prompt's."""
    tokens = np.frombuffer(text, dtype=np.int64)
    last = len(tokens) - 1
    runs = np.zeros(len(tokens), dtype=np.int64)
    ends = np.arange(last)
    for run in range(most):
        ends = ends[ends >= run]
        ends = ends[tokens[ends - run] == tokens[last - run]]
        if not len(ends):
            break
        runs[last - ends] = run + 1
    return runs


class Dry:
    """One row's text, and how long its end is repeated at each distance."""

    def __init__(self, sampling: SamplingParams, bits: bytes, tokens: Sequence[int]) -> None:
        self._multiplier, self._base, self._allowed = (
            sampling.dry_multiplier,
            sampling.dry_base,
            sampling.dry_allowed_length,
        )
        self._most = most_repeated(self._base, self._allowed)
        last_n = sampling.dry_penalty_last_n
        self._last_n = MAX_LOOKBACK if last_n < 0 else min(last_n, MAX_LOOKBACK)
        self._breaks = breaking(bits, 8 * len(bits))
        self._text = np.array(tokens, dtype=np.int64)
        self._length = len(tokens)
        self._runs = np.zeros(len(tokens) + 1, dtype=np.int64)  # by distance back from the end
        self._counted = 0  # the length of the text that they are of

    def append(self, token: int) -> None:
        if self._length == len(self._text):
            self._text = np.concatenate((self._text, np.zeros(max(64, self._length), dtype=np.int64)))
        self._text[self._length] = token
        self._length += 1

    def truncate(self, length: int) -> None:
        self._length = length
        if self._counted > length:
            self._counted = 0

    @property
    def text(self) -> Array:
        return self._text[: self._length]

    def breaks(self, tokens: Array) -> Array:
        """A mask of those that are sequence breakers."""
        known = tokens < len(self._breaks)
        return known & self._breaks[np.where(known, tokens, 0)] if len(self._breaks) else known & False

    def apply(self, logits: Array) -> None:
        """Change one row in place."""
        ids, lengths = self.repeated()
        lengths, ids = lengths[ids < len(logits)], ids[ids < len(logits)]
        if len(ids):
            store(logits, ids, logits[ids].astype(np.float64) - self.amounts(lengths))

    def amounts(self, lengths: Array) -> Array:
        powers = np.power(float(self._base), (np.minimum(lengths, self._most) - self._allowed).astype(np.float64))
        return np.asarray(self._multiplier * powers)

    def repeated(self) -> tuple[Array, Array]:
        """Tokens that would go on with a repetition, and the length of the longest."""
        nothing = np.empty(0, dtype=np.int64)
        window = min(self._length, self._last_n)
        if window <= self._allowed:
            return nothing, nothing
        reach = self._reach(window)
        if reach < self._allowed:
            return nothing, nothing
        self._count()
        distances = np.arange(1, window)
        runs = np.minimum(np.minimum(self._runs[1:window], window - distances), reach)
        found = np.flatnonzero(runs >= self._allowed)
        tokens, runs = self._text[self._length - distances[found]], runs[found]
        goes_on = ~self.breaks(tokens)
        ids, place = np.unique(tokens[goes_on], return_inverse=True)
        longest = np.zeros(len(ids), dtype=np.int64)
        np.maximum.at(longest, place, runs[goes_on])
        return ids, longest

    def _reach(self, window: int) -> int:
        """How many tokens there are after the last breaker."""
        found = np.flatnonzero(self.breaks(self._text[self._length - window : self._length]))
        return window - 1 - int(found[-1]) if len(found) else window

    def _count(self) -> None:
        """Bring the runs up to the text's end, a token at a time."""
        if len(self._runs) < len(self._text) + 1:
            self._runs = np.concatenate((self._runs, np.zeros(len(self._text) + 1 - len(self._runs), dtype=np.int64)))
        if not self._counted:
            runs = count_runs(self.text[-self._last_n - 1 :].tobytes(), self._most)
            self._runs[:] = 0
            self._runs[: len(runs)] = runs
            self._counted = self._length
        for end in range(self._counted, self._length):
            self._runs[end] = 0
            first = max(0, end - self._last_n)
            runs = self._runs[1 : end + 1 - first]
            runs += 1
            runs *= self._text[first:end][::-1] == self._text[end]
        self._counted = self._length
