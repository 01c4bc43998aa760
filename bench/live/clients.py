"""Client processes: each sends its share of the requests when they are due and reads what came back."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType

from bench.load.loop import send_due
from bench.load.stream import Sample, read_sample
from bench.load.wire import Target

LEAD_S = 0.5  # for the requests to reach the processes before the first is due


@dataclass(frozen=True)
class Post:
    """A request, due `due_s` after the start, that asks for `num_output` tokens."""

    due_s: float
    request: bytes
    num_output: int


@dataclass(frozen=True)
class Share:
    """The posts of one process. `start` is on the system's monotonic clock, which all processes have in common."""

    target: Target
    posts: Sequence[Post]
    start: float
    timeout_s: float


@dataclass(frozen=True)
class Report:
    samples: list[Sample]  # in the order of the posts
    busy: float  # share of a core that the busiest client took


def send(share: Share) -> Report:
    """Send one share. The garbage collector rests meanwhile: its pauses would be in the latencies."""
    posts = share.posts
    gc.disable()
    try:
        cpu_s, begin = time.process_time(), time.perf_counter()
        exchanges = asyncio.run(
            send_due(
                share.target,
                [post.request for post in posts],
                [post.due_s for post in posts],
                share.start,
                share.timeout_s,
            )
        )
        busy = (time.process_time() - cpu_s) / (time.perf_counter() - begin)
    finally:
        gc.enable()
    samples = [
        read_sample(exchange, index, share.start, post.num_output)
        for index, (exchange, post) in enumerate(zip(exchanges, posts))
    ]
    return Report(samples, busy)


def _work(pipe: Connection) -> None:
    pipe.send("ready")
    while True:
        try:
            share = pipe.recv()
        except EOFError:
            return
        pipe.send(send(share))


class Clients:
    """`count` processes, which end with the block; one client is this process itself."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pipes: list[Connection] = []

    def __enter__(self) -> Clients:
        context = get_context("spawn")
        for _ in range(self.count if self.count > 1 else 0):
            ours, theirs = context.Pipe()
            context.Process(target=_work, args=(theirs,), daemon=True).start()
            theirs.close()
            self._pipes.append(ours)
        for pipe in self._pipes:
            pipe.recv()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()

    def send(self, target: Target, posts: Sequence[Post], timeout_s: float) -> Report:
        """Deal out the posts in turn; return their samples in order."""
        if not self._pipes:
            return send(Share(target, posts, time.perf_counter(), timeout_s))
        start = time.perf_counter() + LEAD_S
        pipes = self._pipes[: len(posts)]
        for number, pipe in enumerate(pipes):
            pipe.send(Share(target, posts[number :: self.count], start, timeout_s))
        reports = [pipe.recv() for pipe in pipes]
        samples: dict[int, Sample] = {}
        for number, report in enumerate(reports):
            for place, sample in enumerate(report.samples):
                sample.index = number + place * self.count
                samples[sample.index] = sample
        return Report([samples[index] for index in sorted(samples)], max(report.busy for report in reports))
