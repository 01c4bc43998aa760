"""A lone request's way to its first token, station by station."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench.load.wire import Exchange, Target, exchange

STATIONS = (
    "request arrives",
    "body decoded",
    "prompt encoded",
    "request made",
    "command sent",
    "engine adds",
    "engine steps",
    "delta arrives",
    "first token",
)
PAUSE_S = 0.05  # so that both processes are idle when the next request comes
NUM_WARM = 10


def measure_stations(target: Target, request: bytes, path: Path, count: int) -> Iterator[tuple[str, float, float]]:
    """Yield each station with the milliseconds it took to get there from the one before, then the whole: the median,
    and what the fastest tenth stayed below, which other processes disturb less."""
    ways = asyncio.run(_send(target, request, path, NUM_WARM + count))[NUM_WARM:]
    for at, station in enumerate(STATIONS):
        yield station, *_summarize([way[at + 1] - way[at] for way in ways])
    yield "all", *_summarize([way[-1] - way[0] for way in ways])


def _summarize(times_ns: list[int]) -> tuple[float, float]:
    return median(times_ns) / 1e6, sorted(times_ns)[len(times_ns) // 10] / 1e6


async def _send(target: Target, request: bytes, path: Path, count: int) -> list[list[int]]:
    ways = []
    for _ in range(count):
        await asyncio.sleep(PAUSE_S)
        path.write_bytes(b"")
        made = await exchange(target, request, 10.0)
        await asyncio.sleep(PAUSE_S)
        noted: dict[str, int] = {}
        for line in path.read_text().splitlines():
            time_ns, _, station = line.partition(" ")
            noted.setdefault(station, int(time_ns))
        noted["first token"] = int(1e9 * _find_first_token(made))
        ways.append([int(1e9 * made.sent), *(noted[station] for station in STATIONS)])
    return ways


def _find_first_token(made: Exchange) -> float:
    return next((time_s for time_s, data in made.arrivals if b'"text"' in data), time.perf_counter())
