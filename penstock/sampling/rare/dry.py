"""DRY: penalise a token that would extend a repetition, the more the longer it is.

Defined as in llama.cpp: for every earlier occurrence of the text's end, the token that followed loses multiplier * base
** (length - allowed), for the longest such match. No match reaches past a sequence breaker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from penstock.sampling.logits import Array
from penstock.sampling.penalties import store_finite
from penstock.types import MAX_DRY_LENGTH, MAX_LOOKBACK, SamplingParams

LARGEST_LOG = 88.7228391  # log of the largest float32


def max_match_length(base: float, allowed: int) -> int:
    """Return the match length at which the penalty stops growing: larger powers overflow float32."""
    grows = int(LARGEST_LOG / math.log(base)) if base > 1.000001 else 0
    return min(MAX_DRY_LENGTH, allowed + grows)


def unpack_breakers(bits: bytes, size: int) -> Array:
    """Unpack a request's `dry_breakers` into bool [size]."""
    known = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")[:size].astype(bool)
    return np.concatenate((known, np.zeros(size - len(known), dtype=bool)))


@lru_cache(maxsize=4)
def count_runs(text: bytes, max_run: int) -> Array:
    """For each distance back, count the tokens (up to `max_run`) that match the end of `text` (int64 bytes). Cached:
    siblings share their prompt's counts."""
    tokens = np.frombuffer(text, dtype=np.int64)
    last = len(tokens) - 1
    runs = np.zeros(len(tokens), dtype=np.int64)
    ends = np.arange(last)
    for run in range(max_run):
        ends = ends[ends >= run]
        ends = ends[tokens[ends - run] == tokens[last - run]]
        if not len(ends):
            break
        runs[last - ends] = run + 1
    return runs


class Dry:
    """One row's text, and the length of the match of its end at each distance."""

    def __init__(self, sampling: SamplingParams, bits: bytes, tokens: Sequence[int]) -> None:
        self._multiplier, self._base, self._allowed = (
            sampling.dry_multiplier,
            sampling.dry_base,
            sampling.dry_allowed_length,
        )
        self._max_length = max_match_length(self._base, self._allowed)
        last_n = sampling.dry_penalty_last_n
        self._last_n = MAX_LOOKBACK if last_n < 0 else min(last_n, MAX_LOOKBACK)
        self._breaks = unpack_breakers(bits, 8 * len(bits))
        self._text, self._length = np.array(tokens, dtype=np.int64), len(tokens)
        self._runs = np.zeros(len(tokens) + 1, dtype=np.int64)  # by distance from the end
        self._counted = 0  # text length that the runs are for

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

    def find_breakers(self, tokens: Array) -> Array:
        """Return a mask of the sequence breakers among `tokens`."""
        known = tokens < len(self._breaks)
        return known & self._breaks[np.where(known, tokens, 0)] if len(self._breaks) else known & False

    def apply(self, logits: Array) -> None:
        """Penalise one row in place."""
        ids, lengths = self.find_repeats()
        lengths, ids = lengths[ids < len(logits)], ids[ids < len(logits)]
        if len(ids):
            store_finite(logits, ids, logits[ids].astype(np.float64) - self.compute_penalties(lengths))

    def compute_penalties(self, lengths: Array) -> Array:
        powers = np.power(float(self._base), (np.minimum(lengths, self._max_length) - self._allowed).astype(np.float64))
        return np.asarray(self._multiplier * powers)

    def find_repeats(self) -> tuple[Array, Array]:
        """Return the tokens that would extend a repetition, and the longest match of each."""
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
        goes_on = ~self.find_breakers(tokens)
        ids, place = np.unique(tokens[goes_on], return_inverse=True)
        longest = np.zeros(len(ids), dtype=np.int64)
        np.maximum.at(longest, place, runs[goes_on])
        return ids, longest

    def _reach(self, window: int) -> int:
        """Count the tokens after the last sequence breaker."""
        found = np.flatnonzero(self.find_breakers(self._text[self._length - window : self._length]))
        return window - 1 - int(found[-1]) if len(found) else window

    def _count(self) -> None:
        """Extend the runs to the end of the text, one token at a time."""
        if len(self._runs) < len(self._text) + 1:
            self._runs = np.concatenate((self._runs, np.zeros(len(self._text) + 1 - len(self._runs), dtype=np.int64)))
        if not self._counted:
            runs = count_runs(self.text[-self._last_n - 1 :].tobytes(), self._max_length)
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
