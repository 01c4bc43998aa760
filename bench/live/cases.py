"""The cases: what is sent, and which figures count."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from bench.live.traffic import Row, Size, Traffic, count
from bench.load.figures import Limits

SHORT = Size(1, 128, 256)
SIZES = (3, 5, 12, 24, 48, 96, 200)
RATES = (10, 20, 28)
AIMS_MS: dict[float, tuple[float, float]] = {10: (80, 7.5), 20: (130, 14), 28: (350, 32)}  # rate → TTFT, TPOT


@dataclass(frozen=True)
class Settings:
    """`scale` is of requests and lengths; `aims_ms` are TTFT and TPOT, None where the rate's own hold."""

    scale: float = 1.0
    num_rounds: int = 2
    num_repeats: int = 5
    seconds: float = 60.0
    aims_ms: tuple[float | None, float | None] = (None, None)


def first_after_64(traffic: Traffic, settings: Settings) -> Row:
    """Burst of 64, then the first burst of 32, and the same size again."""
    before, first, again = (traffic.burst(_short(number, settings)) for number in (64, 32, 32))
    return {**_compare(first, again), "out_tok_s_of_64": _speed(before), **count([before, first, again])}


def first_sizes(traffic: Traffic, settings: Settings) -> Row:
    """One request; then bursts of seven sizes, each for the first time and again."""
    rows = [traffic.burst(_short(1, settings))]
    sizes: dict[str, Row] = {}
    for number in SIZES:
        size = _short(number, settings)
        if str(size.num_requests) in sizes:
            continue
        pair = [traffic.burst(size) for _ in range(2)]
        sizes[str(size.num_requests)] = _compare(*pair)
        rows += pair
    shares = [row["first_share"] for row in sizes.values() if row["first_share"] is not None]
    return {"sizes": sizes, "first_share": min(shares, default=None), **count(rows)}


def one(traffic: Traffic, settings: Settings) -> Row:
    """One request alone, repeated; medians."""
    rows = [traffic.burst(_short(1, settings)) for _ in range(settings.num_repeats)]
    good = [row for row in rows if row["num_ok"]]
    return {
        "out_tok_s": _round(statistics.median(row["output_tokens_per_s"] for row in good)) if good else None,
        "ttft_p50_ms": _ms(statistics.median(row["ttft_s"]["p50"] for row in good)) if good else None,
        "tpot_p50_ms": _ms(statistics.median(row["tpot_s"]["p50"] for row in good)) if good else None,
        **count(rows),
    }


def burst(size: Size) -> Callable[[Traffic, Settings], Row]:
    def run(traffic: Traffic, settings: Settings) -> Row:
        rows = [traffic.burst(size.scale(settings.scale)) for _ in range(settings.num_rounds)]
        best = max(rows, key=lambda row: float(row["output_tokens_per_s"]))
        return {
            "out_tok_s": _speed(best),
            "out_tok_s_of_each": [_speed(row) for row in rows],
            **_latencies(best),
            **count(rows),
        }

    return run


def poisson(rate: float) -> Callable[[Traffic, Settings], Row]:
    def run(traffic: Traffic, settings: Settings) -> Row:
        aims = [given or own for given, own in zip(settings.aims_ms, AIMS_MS.get(rate, (None, None)))]
        ttft_ms, tpot_ms = (float("inf") if aim is None else aim for aim in aims)
        length = Size(1, 1024, 256).scale(settings.scale)
        num_requests = max(1, round(rate * settings.seconds * settings.scale))
        size = Size(num_requests, length.num_input, length.num_output)
        row = traffic.poisson(size, rate, Limits(ttft_ms / 1e3, tpot_ms / 1e3))
        found: Row = {
            "rate": rate,
            **_latencies(row),
            "out_tok_s": _speed(row),
            "requests_s": round(row["requests_per_s"], 3),
            "duration_s": round(row["duration_s"], 2),
        }
        if aims != [None, None]:
            goodput = {"goodput": round(row["goodput"]["share"], 4), "ttft_slo_ms": aims[0], "tpot_slo_ms": aims[1]}
            found |= goodput
        return found | count([row])

    return run


@dataclass(frozen=True)
class Case:
    """A `fresh` case wants a server that has answered nothing yet."""

    title: str
    run: Callable[[Traffic, Settings], Row]
    fresh: bool = False


READY = "ready"
CASES: dict[str, Case] = {
    "first-sizes": Case("bursts of 3 to 200 × 128 in, 256 out, each size first and again", first_sizes, True),
    "first-32-after-64": Case("first burst of 32 × 128 in, 256 out, after one of 64", first_after_64, True),
    "one": Case("1 × 128 in, 256 out, alone", one),
    "burst-256x128-512": Case("256 × 128 in, 512 out at once", burst(Size(256, 128, 512))),
    "burst-256x1024-128": Case("256 × 1024 in, 128 out at once", burst(Size(256, 1024, 128))),
    **{f"rate-{rate}": Case(f"{rate} requests/s, 1024 in, 256 out", poisson(rate)) for rate in RATES},
}


def find_case(name: str) -> Case | None:
    """Return a case by name; `rate-N` may have any number."""
    if name in CASES:
        return CASES[name]
    if (found := re.fullmatch(r"rate-(\d+(?:\.\d+)?)", name)) and (rate := float(found[1])):
        return Case(f"{rate:g} requests/s, 1024 in, 256 out", poisson(rate))
    return None


def _short(number: int, settings: Settings) -> Size:
    return Size(number, SHORT.num_input, SHORT.num_output).scale(settings.scale)


def _compare(first: Row, again: Row) -> Row:
    share = first["output_tokens_per_s"] / again["output_tokens_per_s"] if again["output_tokens_per_s"] else None
    return {
        "out_tok_s": _speed(first),
        "again_out_tok_s": _speed(again),
        "first_share": None if share is None else round(share, 3),
    }


def _latencies(row: Row) -> Row:
    """Percentiles in milliseconds; None where no answer came."""
    return {
        f"{name}_{part}_ms": _ms(spread[part]) if (spread := row[f"{name}_s"]) else None
        for name, parts in (("ttft", ("p50", "p99")), ("tpot", ("p50", "p99")), ("itl", ("p99",)), ("late", ("p99",)))
        for part in parts
    }


def _speed(row: Row) -> float:
    return _round(row["output_tokens_per_s"])


def _round(value: float) -> float:
    return round(value, 1)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
