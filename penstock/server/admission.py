"""Who may wait, and who of those waiting goes next.

Tenants share the engine by virtual token counters: each is charged for what it is given, prompt tokens once and output
tokens twice, divided by its weight; the one that has been given least goes first. A tenant that returns after a pause
starts level with the others, so that idleness saves nothing up.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from penstock.errors import Busy
from penstock.server.flight import Flight

OUTPUT_COST = 2.0
MEMORY_S = 30.0             # over which the pace is measured
MOST_RETRY_S = 60


class Pace:
    """Requests finished per second, of late."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque()

    def count(self) -> None:
        self._ends.append(self._clock())
        self._forget()

    def per_s(self) -> float:
        self._forget()
        if len(self._ends) < 2:
            return 0.0
        return len(self._ends) / max(1e-3, self._clock() - self._ends[0])

    def _forget(self) -> None:
        while self._ends and self._clock() - self._ends[0] > MEMORY_S:
            self._ends.popleft()


class Admission:
    def __init__(self, max_requests: int, max_tokens: int, weights: Mapping[str, float] | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_tokens = 0                     # of the prompts that wait
        self.num_refused = 0
        self.pace = Pace(clock)
        self._weights = dict(weights or {})
        self._queues: dict[str, list[Flight]] = {}
        self._spent: dict[str, float] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __iter__(self) -> Iterator[Flight]:
        for queue in self._queues.values():
            yield from queue

    def check(self, num_tokens: int = 0) -> None:
        """Refuse a request for which there is no room, before any work is done for it."""
        count = len(self)
        if count < self.max_requests and (not count or self.num_tokens + num_tokens <= self.max_tokens):
            return
        self.num_refused += 1
        limit = (f"{count} requests wait, the limit is {self.max_requests}" if count >= self.max_requests else
                 f"prompts of {self.num_tokens} tokens wait, the limit is {self.max_tokens}")
        retry = self.retry_after_s()
        raise Busy(f"the server is busy: {limit}; try again in {retry} s, or raise the limit", retry)

    def retry_after_s(self) -> int:
        """When a request that comes now would find half of the queue gone, at the present pace."""
        pace = self.pace.per_s()
        return min(MOST_RETRY_S, max(1, math.ceil((len(self) / 2 + 1) / pace))) if pace else 1

    def enter(self, flight: Flight) -> None:
        self.check(len(flight.request.tokens))
        queue = self._queues.setdefault(flight.tenant, [])
        if not queue:
            level = min((self._spent[other] for other, waiting in self._queues.items() if waiting and
                         other in self._spent), default=0.0)
            self._spent[flight.tenant] = max(self._spent.get(flight.tenant, 0.0), level)
        at = len(queue)
        while at and queue[at - 1].request.priority > flight.request.priority:
            at -= 1
        queue.insert(at, flight)
        self.num_tokens += len(flight.request.tokens)

    def leave(self, flight: Flight) -> bool:
        """Take one out that will not wait any longer; whether it did wait."""
        queue = self._queues.get(flight.tenant, [])
        if flight not in queue:
            return False
        queue.remove(flight)
        self._left(flight)
        return True

    def next(self) -> Flight | None:
        """The first of the best priority, among the tenants that have been given least."""
        waiting = [tenant for tenant, queue in self._queues.items() if queue]
        if not waiting:
            return None
        best = min(self._queues[tenant][0].request.priority for tenant in waiting)
        tenant = min((t for t in waiting if self._queues[t][0].request.priority == best),
                     key=lambda t: self._spent.get(t, 0.0))
        flight = self._queues[tenant].pop(0)
        self._left(flight)
        self.charge(tenant, len(flight.request.tokens))
        return flight

    def _left(self, flight: Flight) -> None:
        self.num_tokens -= len(flight.request.tokens)
        if not self._queues[flight.tenant]:
            del self._queues[flight.tenant]

    def charge(self, tenant: str, num_prompt: int = 0, num_output: int = 0) -> None:
        cost = (num_prompt + OUTPUT_COST * num_output) / self._weights.get(tenant, 1.0)
        self._spent[tenant] = self._spent.get(tenant, 0.0) + cost
