"""Seconds of a step as a linear function of its sizes, fitted to measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

MIN_SAMPLES = 8  # before that there is no fit
FADING = 1 - 1 / 64  # of a step's weight, with each later step
MAX_RATIO = 2.0  # a step counts as at most so many times what was expected: one compilation must teach little
REFIT = 8  # steps after which an unused fit is renewed
INERTIA = 0.05  # weight of the present coefficients, which holds those that no step tells apart


class StepFit:
    """Least squares over recent steps. `num_sizes` describe a step; before the first fit the cost is in proportion to
    the last of them, or constant if there is only one."""

    def __init__(self, num_sizes: int) -> None:
        self._lead = num_sizes if num_sizes > 1 else 0  # 0 is the constant
        self._first: list[tuple[tuple[float, ...], float]] = []
        self._products = [[0.0] * (num_sizes + 1) for _ in range(num_sizes + 1)]
        self._moments = [0.0] * (num_sizes + 1)
        self._coefficients = [0.0] * (num_sizes + 1)
        self._num_unfitted = 0

    @property
    def is_ready(self) -> bool:
        return len(self._first) >= MIN_SAMPLES

    def note(self, sizes: Sequence[float], seconds: float) -> None:
        """Take note of a measured step."""
        point = (1.0, *sizes)
        if self.is_ready:
            self._add(point, seconds)
            return
        self._first.append((point, seconds))
        if self.is_ready:
            self._coefficients[self._lead] = median(s / p[self._lead] for p, s in self._first)
            for earlier, taken in self._first:
                self._add(earlier, taken)

    def _add(self, point: tuple[float, ...], seconds: float) -> None:
        if self._num_unfitted >= REFIT:
            self._fit()
        seconds = min(seconds, MAX_RATIO * max(0.0, self._evaluate(point)) or seconds)
        for i, value in enumerate(point):
            row = self._products[i]
            for j, other in enumerate(point):
                row[j] = FADING * row[j] + value * other
            self._moments[i] = FADING * self._moments[i] + value * seconds
        self._num_unfitted += 1

    def _fit(self) -> None:
        rows = [list(row) for row in self._products]
        for i, row in enumerate(rows):
            row[i] += INERTIA
        known = [moment + INERTIA * c for moment, c in zip(self._moments, self._coefficients)]
        self._coefficients, self._num_unfitted = solve(rows, known), 0

    @property
    def coefficients(self) -> list[float]:
        """Seconds of a step of sizes 0, then those that one more of each size adds."""
        if self._num_unfitted:
            self._fit()
        return self._coefficients

    def estimate(self, *sizes: float) -> float:
        """Seconds of a step of these sizes; 0 at least."""
        return max(0.0, sum(c * value for c, value in zip(self.coefficients, (1.0, *sizes))))

    def _evaluate(self, point: Sequence[float]) -> float:
        return sum(c * value for c, value in zip(self._coefficients, point))


def solve(rows: list[list[float]], known: list[float]) -> list[float]:
    """Solve a small positive definite system in place, by elimination."""
    size = len(known)
    for i in range(size):
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            for j in range(i, size):
                rows[k][j] -= factor * rows[i][j]
            known[k] -= factor * known[i]
    for i in reversed(range(size)):
        known[i] = (known[i] - sum(rows[i][j] * known[j] for j in range(i + 1, size))) / rows[i][i]
    return known
