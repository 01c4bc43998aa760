"""Rates over the last seconds, from totals that only grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import ClassVar

SHORT_S, LONG_S = 2.0, 10.0  # for tokens and steps; for latencies, which are rarer


class RateWindow:
    """Totals of the last seconds."""

    COUNTERS: ClassVar = ("num_output_tokens", "num_prompt_tokens", "num_cached_tokens", "num_steps", "step_s")

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Mapping[str, float]]] = deque()

    def add(self, now_s: float, totals: Mapping[str, float]) -> None:
        samples = self._samples
        if samples and now_s <= samples[-1][0]:
            return
        samples.append((now_s, totals))
        while len(samples) > 2 and now_s - samples[1][0] >= LONG_S:
            samples.popleft()

    @property
    def rates(self) -> dict[str, float | None]:
        """Tokens per second and milliseconds; None where there was nothing to measure."""
        seconds, new = self._grow(SHORT_S)
        _, late = self._grow(LONG_S)
        return {
            "prompt_tokens_per_s": _divide(new["num_prompt_tokens"], seconds, 1.0),
            "generation_tokens_per_s": _divide(new["num_output_tokens"], seconds, 1.0),
            "ttft_ms": _divide(late["ttft_s"], late["num_ttft"], 1e3),
            "tpot_ms": _divide(late["tpot_s"], late["num_tpot"], 1e3),
            "hit_rate": _divide(late["num_cached_tokens"], late["num_prompt_tokens"], 1.0),
            "step_ms": _divide(new["step_s"], new["num_steps"], 1e3),
        }

    def _grow(self, window_s: float) -> tuple[float, dict[str, float]]:
        """Return how long the window is, and how much each total grew in it."""
        last_s, last = self._samples[-1]
        first_s, first = next((one for one in reversed(self._samples) if last_s - one[0] >= window_s), self._samples[0])
        return last_s - first_s, {name: value - first[name] for name, value in last.items()}


def _divide(value: float, by: float, scale: float) -> float | None:
    return round(scale * value / by, 4) if by > 0 else None
