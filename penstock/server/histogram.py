"""Histograms that may be observed for every token."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily


class LoopHistogram:
    """Values by model, observed by the event loop alone: it takes no lock, and finds a bucket by halves."""

    def __init__(self, name: str, help: str, buckets: Sequence[float]) -> None:
        self._name, self._help, self._buckets = name, help, list(buckets)
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def add_model(self, model: str) -> None:
        self._counts.setdefault(model, [0] * (len(self._buckets) + 1))
        self._sums.setdefault(model, 0.0)

    def observe(self, model: str, value: float) -> None:
        counts = self._counts.get(model)
        if counts is None:
            self.add_model(model)
            counts = self._counts[model]
        counts[bisect_left(self._buckets, value)] += 1
        self._sums[model] += value

    def total(self, model: str) -> tuple[int, float]:
        """Return how many values a model has, and their sum."""
        return sum(self._counts.get(model, ())), self._sums.get(model, 0.0)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=["model_name"])
        bounds = [*(str(float(bound)) for bound in self._buckets), "+Inf"]
        for model, counts in list(self._counts.items()):
            total, buckets = 0, []
            for bound, count in zip(bounds, list(counts)):
                total += count
                buckets.append((bound, total))
            family.add_metric([model], buckets, self._sums[model])
        yield family


class GapHistogram(LoopHistogram):
    """Seconds between tokens, and how many tokens came at their ends."""

    def __init__(self, name: str, help: str, buckets: Sequence[float]) -> None:
        super().__init__(name, help, buckets)
        self.num_tokens: Counter[str] = Counter()

    def observe_gap(self, model: str, seconds: float, num_tokens: int) -> None:
        self.observe(model, seconds)
        self.num_tokens[model] += num_tokens
