"""When requests are sent: a number of them at once (closed loop), or a number a second, come what may (open loop)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from bench.load.wire import Exchange, Target, exchange

Arrival = Literal["poisson", "uniform"]
Finished = Callable[[], None]


@dataclass(frozen=True)
class Pace:
    """`concurrency` requests at any time, or `rate` a second."""

    concurrency: int | None = None
    rate: float | None = None
    arrival: Arrival = "poisson"
    seed: str = "0"

    def due_times(self, count: int) -> list[float]:
        """Seconds from the start, of an open loop; the first request is due at once."""
        assert self.rate
        source = random.Random(self.seed)
        times = [0.0]
        while len(times) < count:
            gap = source.expovariate(self.rate) if self.arrival == "poisson" else 1 / self.rate
            times.append(times[-1] + gap)
        return times[:count]


@dataclass(frozen=True)
class Drive:
    """What one pass over the requests gave, in their order."""

    exchanges: list[Exchange]
    start: float
    client_cpu_s: float


async def drive(target: Target, requests: Sequence[bytes], pace: Pace, timeout_s: float, finished: Finished) -> Drive:
    cpu_s, start = time.process_time(), time.perf_counter()
    if pace.rate:
        exchanges = await send_due(target, requests, pace.due_times(len(requests)), start, timeout_s, finished)
    else:
        exchanges = await _closed(target, requests, pace.concurrency or 1, timeout_s, finished)
    return Drive(exchanges, start, time.process_time() - cpu_s)


async def _closed(
    target: Target, requests: Sequence[bytes], concurrency: int, timeout_s: float, finished: Finished
) -> list[Exchange]:
    found: dict[int, Exchange] = {}
    rest = iter(enumerate(requests))

    async def work() -> None:
        for index, request in rest:
            found[index] = await exchange(target, request, timeout_s)
            finished()

    await asyncio.gather(*(work() for _ in range(min(concurrency, len(requests)))))
    return [found[index] for index in range(len(requests))]


async def send_due(
    target: Target,
    requests: Sequence[bytes],
    times: Sequence[float],
    start: float,
    timeout_s: float,
    finished: Finished = lambda: None,
) -> list[Exchange]:
    """Send each request at its time, in seconds from `start` and in order, answered or not.

    Latencies count from when a request was due: a late client must not make the server look faster.
    """

    async def send(request: bytes, due: float) -> Exchange:
        made = await exchange(target, request, timeout_s, due)
        finished()
        return made

    tasks = []
    for request, after_s in zip(requests, times):
        due = start + after_s
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(send(request, due)))
    return list(await asyncio.gather(*tasks))
