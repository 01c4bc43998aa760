"""Requests that wait for blocks of another server, fetched by threads beside the steps."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from penstock.engine.messages import Add
from penstock.types import Request

MAX_FETCHING = 4  # at once
Fetch = Callable[[Request, int], int]  # blocks of a prompt beyond its first tokens, which are known; how many came
_log = logging.getLogger(__name__)


class Fetches:
    """`fetch` is called in a thread; a request enters the engine when it has returned, whatever came of it."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._waiting: dict[str, Add] = {}
        self._threads = ThreadPoolExecutor(MAX_FETCHING, "penstock-fetch")
        self._fetched: queue.SimpleQueue[tuple[str, int, float]] = queue.SimpleQueue()

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, command: Add, num_known: int) -> None:
        """Fetch what a request's source has beyond the first `num_known` tokens."""
        self._waiting[command.request.id] = command
        self._threads.submit(self._run, command.request, num_known)

    def drop(self, id: str) -> None:
        self._waiting.pop(id, None)

    def take(self) -> Iterator[tuple[Add, int, float]]:
        """Yield the requests that are ready, with the blocks that came and the seconds that it took."""
        while self._waiting and not self._fetched.empty():
            id, count, seconds = self._fetched.get()
            command = self._waiting.pop(id, None)
            if command is not None:
                yield command, count, seconds

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, request: Request, num_known: int) -> None:
        count, begin = 0, time.perf_counter()
        try:
            if request.id in self._waiting:
                count = self._fetch(request, num_known)
        except Exception:
            _log.exception("cache blocks could not be fetched, and are computed here")
        self._fetched.put((request.id, count, time.perf_counter() - begin))
