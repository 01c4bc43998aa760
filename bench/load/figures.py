"""Samples become figures. Latencies and speeds come from the answers that have the length asked for, and no others."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.load.stream import Sample

Row = dict[str, Any]
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Limits:
    """A request counts as good when it keeps both, in seconds."""

    ttft_s: float = 2.0
    tpot_s: float = 0.2

    def keeps(self, sample: Sample) -> bool:
        return (
            sample.outcome == "ok"
            and sample.first_s is not None
            and sample.first_s <= self.ttft_s
            and (sample.tpot_s or 0.0) <= self.tpot_s
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest ranks in proportion, as numpy has it."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Iterable[float | None]) -> Row | None:
    found = [value for value in values if value is not None]
    if not found:
        return None
    return {
        "mean": statistics.fmean(found),
        **{f"p{p}": percentile(found, p) for p in PERCENTILES},
        "max": max(found),
        "count": len(found),
    }


def summarize(samples: Sequence[Sample], limits: Limits) -> Row:
    good = [sample for sample in samples if sample.outcome == "ok"]
    duration_s = _duration_s(samples)
    outcomes = Counter(sample.outcome for sample in samples)
    refused = [sample for sample in samples if sample.outcome == "refused"]
    num_tokens = sum(sample.num_output or 0 for sample in good)
    kept = [sample for sample in good if limits.keeps(sample)]

    def per_s(count: float) -> float:
        return count / duration_s if duration_s else 0.0

    return {
        "num_requests": len(samples),
        "num_ok": len(good),
        "num_wrong_length": outcomes["wrong length"],
        "num_refused": len(refused),
        "num_disconnected": outcomes["disconnected"],
        "num_failed": outcomes["failed"] + outcomes["timeout"],
        "errors": _errors(samples),
        "duration_s": duration_s,
        "num_output_tokens": num_tokens,
        "output_tokens_per_s": per_s(num_tokens),
        "requests_per_s": per_s(len(good)),
        "goodput": {
            "num": len(kept),
            "share": len(kept) / len(samples) if samples else 0.0,
            "requests_per_s": per_s(len(kept)),
            "ttft_limit_s": limits.ttft_s,
            "tpot_limit_s": limits.tpot_s,
        },
        "ttft_s": spread(sample.first_s for sample in good),
        "tpot_s": spread(sample.tpot_s for sample in good),
        "itl_s": spread(gap for sample in good for gap in sample.gaps_s),
        "e2e_s": spread(sample.last_s for sample in good),
        "refusal_s": spread(sample.last_s for sample in refused),
        "retry_after_s": spread(sample.retry_after_s for sample in refused),
        "prompt_tokens": spread(sample.num_prompt for sample in good),
        "cached_tokens": spread(sample.num_cached for sample in good),
        "late_s": spread(sample.late_s for sample in samples),
    }


def _duration_s(samples: Sequence[Sample]) -> float:
    """From the first request to the last byte of the last answer or refusal."""
    if not samples:
        return 0.0
    end_s = max(sample.begin_s + (sample.last_s or 0.0) for sample in samples)
    return end_s - min(sample.begin_s for sample in samples)


def _errors(samples: Sequence[Sample]) -> dict[str, int]:
    """How many by status, or by what happened where a status says nothing."""

    def label(sample: Sample) -> str:
        return str(sample.status) if sample.status not in (None, 200) else sample.outcome

    return dict(Counter(label(sample) for sample in samples if sample.outcome != "ok"))
