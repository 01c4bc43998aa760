"""Seconds that a step takes, by its sequences and tokens, as measured."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping

NUM_SAMPLES = 8  # of each kind of step; the fastest counts: noise only adds
MIN_SAMPLES = 3  # a CPU runs the first two steps of a shape without its tape
MAX_AGE = 192  # steps; a cost measured while the machine was busy must not stop drafts for long
TRUST = 0.6  # until it is measured, one more token costs 0.4 of a step of one sequence, 0.9 of a share in 64
FIRST_SLOPE = 0.25  # of a step, for one more token, before anything is known
MAX_RATIO = 1.5  # of numbers of sequences that tell what each other's draft tokens cost


class StepCosts:
    """Costs of steps that were measured, and estimates between and beyond them."""

    def __init__(self) -> None:
        self._samples: dict[tuple[int, int], deque[tuple[int, float]]] = {}
        self._by_tokens: dict[int, tuple[int, float]] = {}  # when it was last measured, and the seconds
        self._by_sequences: dict[int, dict[int, tuple[int, float]]] = {}  # the same of each number of sequences
        self._curve: tuple[list[int], list[float]] | None = None  # fitted to that; None: out of date
        self._now = 0

    def note(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        self._now += 1
        samples = self._samples.setdefault((num_sequences, num_tokens), deque(maxlen=NUM_SAMPLES))
        samples.append((self._now, seconds))
        fastest = self.find_fastest(num_sequences, num_tokens)
        if fastest is not None:
            self._by_tokens[num_tokens], self._curve = (self._now, fastest), None
            self._by_sequences.setdefault(num_sequences, {})[num_tokens] = self._now, fastest

    def find_fastest(self, num_sequences: int, num_tokens: int) -> float | None:
        """The fastest of the last steps of this kind; None if there were too few, or all are old."""
        samples = self._samples.get((num_sequences, num_tokens))
        if samples is None or len(samples) < MIN_SAMPLES or self._now - samples[-1][0] > MAX_AGE:
            return None
        return min(seconds for _, seconds in samples)

    def estimate(self, num_sequences: int, num_tokens: int) -> float | None:
        """Seconds of a step of so many sequences and tokens; None before anything was measured."""
        exact = self.find_fastest(num_sequences, num_tokens)
        if exact is not None:
            return exact
        between = self._find_between(num_sequences, num_tokens)
        if between is not None:
            return between
        base = self.find_plain(num_sequences)
        if base is None or num_tokens < num_sequences:
            return self._interpolate(num_tokens)
        if num_tokens == num_sequences:
            return base
        near = self._find_near(num_sequences, num_tokens - num_sequences)
        if near is not None:
            return base + near
        there, here = self._interpolate(num_tokens), self._interpolate(num_sequences)
        caution = 1 - TRUST / math.sqrt(num_sequences)
        least = caution * base * (num_tokens - num_sequences) / num_sequences
        return base + (least if there is None or here is None else max(least, there - here))

    def find_plain(self, num_sequences: int) -> float | None:
        """Seconds of a step without drafts, of so many sequences or about as many; None if it was not measured."""
        exact = self.find_fastest(num_sequences, num_sequences)
        if exact is not None:
            return exact
        found = (self.find_fastest(other, other) for other in self._list_near(num_sequences))
        return next((seconds for seconds in found if seconds is not None), None)

    def _list_near(self, num_sequences: int) -> list[int]:
        """List about as many sequences as have been measured, the nearest first."""
        near = [n for n in self._by_sequences if n and max(n, num_sequences) <= MAX_RATIO * min(n, num_sequences)]
        return sorted((n for n in near if n != num_sequences), key=lambda n: abs(n - num_sequences))

    def hope(self, num_sequences: int, num_tokens: int) -> float | None:
        """Seconds that such a step may take at best, where it was not measured: by what tokens cost in other steps,
        prompts included."""
        known = self.estimate(num_sequences, num_tokens)
        base, there, here = (
            self.find_plain(num_sequences),
            self._interpolate(num_tokens),
            self._interpolate(num_sequences),
        )
        if known is None or base is None or there is None or here is None or self.is_known(num_sequences, num_tokens):
            return known
        return min(known, base + max(0.0, there - here))

    def is_known(self, num_sequences: int, num_tokens: int) -> bool:
        """True if such a step was measured, or steps of as many sequences with fewer and with more tokens."""
        exact = self.find_fastest(num_sequences, num_tokens)
        return exact is not None or self._find_between(num_sequences, num_tokens) is not None

    def find_price(self, num_sequences: int) -> float | None:
        """Seconds of one more token in a step with a prompt: the mean up to the largest steps that were measured."""
        here = self._interpolate(num_sequences)
        if here is None or self._curve is None or self._curve[0][-1] <= 2 * num_sequences:
            return None
        known, costs = self._curve
        return max(0.0, costs[-1] - here) / (known[-1] - num_sequences)

    def _find_near(self, num_sequences: int, more: int) -> float | None:
        """Return what `more` tokens cost in steps of about as many sequences, if it was measured."""
        for other in self._list_near(num_sequences):
            base, there = self.find_fastest(other, other), self.find_fastest(other, other + more)
            there = self._find_between(other, other + more) if there is None else there
            if base is not None and there is not None:
                return max(0.0, there - base)
        return None

    def _find_between(self, num_sequences: int, num_tokens: int) -> float | None:
        """Read the line between the nearest steps of as many sequences, with fewer and with more tokens."""
        recent = {
            tokens: seconds
            for tokens, (at, seconds) in self._by_sequences.get(num_sequences, {}).items()
            if self._now - at <= MAX_AGE
        }
        low = max((tokens for tokens in recent if tokens < num_tokens), default=None)
        high = min((tokens for tokens in recent if tokens > num_tokens), default=None)
        if low is None or high is None:
            return None
        return recent[low] + max(0.0, recent[high] - recent[low]) * (num_tokens - low) / (high - low)

    def _interpolate(self, num_tokens: int) -> float | None:
        """Read the curve: between two points on the line that joins them, beyond the last one on the line from the
        first."""
        if self._curve is None:
            recent = {tokens: s for tokens, (at, s) in self._by_tokens.items() if self._now - at <= MAX_AGE}
            self._curve = fit_monotone(recent)
        known, costs = self._curve
        if not known:
            return None
        at = bisect_left(known, num_tokens)
        if at == 0:
            return costs[0]
        low, base = known[at - 1], costs[at - 1]
        if at < len(known):
            return base + (costs[at] - base) * (num_tokens - low) / (known[at] - low)
        slope = FIRST_SLOPE * base / low if at == 1 else (base - costs[0]) / (low - known[0])
        return base + slope * (num_tokens - low)


def fit_monotone(points: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """Return the points in order, with neighbours that fall averaged: more tokens never cost less."""
    known = sorted(points)
    pools: list[tuple[float, int]] = []  # mean and number of points
    for tokens in known:
        mean, count = points[tokens], 1
        while pools and pools[-1][0] > mean:
            before, others = pools.pop()
            mean, count = (before * others + mean * count) / (others + count), others + count
        pools.append((mean, count))
    return known, [mean for mean, count in pools for _ in range(count)]
