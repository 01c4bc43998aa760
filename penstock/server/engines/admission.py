"""Queue requests: who may wait, and who goes next.

Tenants are served by `FairShares`: each is charged for prompt tokens once and output tokens twice, divided by its
weight, and the one charged least goes first. A tenant that returns after a pause starts level with the others. Within a
tenant the better priority goes first; requests of equal priority take turns, one prompt at a time, or follow the
scheduling policy.

A tenant may fill the whole queue. When it is full, the newest request of the tenant furthest over its share is
displaced by one of a tenant below its own.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.errors import Busy
from penstock.server.engines.in_flight import InFlightRequest
from penstock.server.engines.prompt_pace import MAX_RETRY_S, PromptPace
from penstock.server.engines.queues import Placement, PromptQueue, TenantQueue, make_order

OUTPUT_COST = 2.0
WINDOW_S = 30.0  # over which throughput is measured


class FairShares:
    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights: Mapping[str, float] = {} if weights is None else weights  # live: changes when keys are reloaded
        self._spent: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # entries may be stale: a tenant may have spent more since
        self._in_heap: set[str] = set()
        self._level = 0.0  # spent by the tenant served last

    @property
    def is_shared(self) -> bool:
        return len(self.weights) > 1

    def divide(self, names: Iterable[str]) -> dict[str, float]:
        """Return the fractions of the whole that `names` are entitled to, by weight."""
        weights = {name: self.weights.get(name, 1.0) for name in names}
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    def raise_to_level(self, name: str) -> None:
        """Start a tenant that has not been waiting level with the others."""
        self._spent[name] = max(self._spent.get(name, 0.0), self._level)

    def add(self, name: str) -> None:
        if name not in self._in_heap:
            self._in_heap.add(name)
            heapq.heappush(self._heap, (self._spent.get(name, 0.0), name))

    def charge(self, tenant: str, num_prompt: int = 0, num_output: int = 0) -> None:
        cost = (num_prompt + OUTPUT_COST * num_output) / self.weights.get(tenant, 1.0)
        self._spent[tenant] = self._spent.get(tenant, 0.0) + cost

    def serve(self, name: str) -> None:
        self._level = max(self._level, self._spent.get(name, 0.0))

    def forget(self, waiting: Container[str], max_tenants: int) -> None:
        """Forget tenants that would start level with the others anyway, if too many are remembered; then all."""
        if len(self._spent) > max_tenants:
            self._spent = {name: one for name, one in self._spent.items() if one > self._level or name in waiting}
        if len(self._spent) > max_tenants:
            self._spent = {name: one for name, one in self._spent.items() if name in waiting}

    def pick(self, waiting: Container[str]) -> str | None:
        while self._heap:
            spent, name = self._heap[0]
            now = self._spent.get(name, 0.0)
            if name not in waiting:
                self._in_heap.remove(heapq.heappop(self._heap)[1])
            elif spent < now:
                heapq.heapreplace(self._heap, (now, name))
            else:
                return name
        return None


class Throughput:
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
        while self._ends and self._clock() - self._ends[0] > WINDOW_S:
            self._ends.popleft()


class AdmissionQueue:
    """Limits count the next prompt of each request; further prompts of a request have limits of their own of the same
    size. A tenant's first such request always fits, so that none is refused for its own size alone."""

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        weights: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        policy: str = "fcfs",
        ttft_s: float | None = None,
    ) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_refused = 0
        self.throughput = Throughput(clock)
        self.pace = PromptPace(ttft_s, clock)
        self.order = make_order(policy)
        self.fair_shares = FairShares(weights)
        self.tenants: dict[str, TenantQueue] = {}  # with waiting requests
        self._num_queues = 0
        self._num_flights = 0
        self.num_tokens = 0  # of each request's next prompt
        self._num_all_tokens = 0

    def __len__(self) -> int:
        return self._num_flights

    def __iter__(self) -> Iterator[InFlightRequest]:
        for tenant in self.tenants.values():
            yield from tenant

    def enter(self, *flights: InFlightRequest) -> None:
        """Queue the prompts of one client request, all or none; Busy if they do not fit or would wait too long."""
        name = flights[0].tenant
        busy = self.pace.find_excess(flights[0])
        if busy is not None:
            self.num_refused += 1
            raise busy
        self._make_room(name, flights)
        self.pace.enter(flights)
        if name not in self.tenants:
            self.fair_shares.raise_to_level(name)
        tenant = self._open_tenant(name)
        queue = PromptQueue(flights)
        for flight in flights:
            flight.queue = queue
        tenant.add(queue)
        self._count(tenant, queue, len(flights), sum(len(flight.request.tokens) for flight in flights))

    def put_back(self, flight: InFlightRequest) -> None:
        """Queue a request again as the next of its client request, regardless of limits."""
        queue = flight.queue
        assert queue is not None
        if flight not in queue.flights:
            tenant = self._open_tenant(flight.tenant)
            queue.put_first(flight)
            tenant.add(queue)
            self._count(tenant, queue, 1, len(flight.request.tokens))

    def _open_tenant(self, name: str) -> TenantQueue:
        if name not in self.tenants:
            self.tenants[name] = TenantQueue(name, self.order)
            self.fair_shares.add(name)
        return self.tenants[name]

    def _make_room(self, name: str, flights: Sequence[InFlightRequest]) -> None:
        num_head = len(flights[0].request.tokens)
        num_further = sum(len(flight.request.tokens) for flight in flights) - num_head
        while (problem := self._find_reached_limit(num_head)) is not None:
            shares = self.fair_shares.divide([*self.tenants, name])
            count_by_tenant = {tenant.name: problem.count(tenant) for tenant in self.tenants.values()}
            own = count_by_tenant.get(name, 0) + problem.needed
            newest = self._find_displaceable(count_by_tenant, shares, problem.limit, name)
            if name in self.tenants and (newest is None or own > shares[name] * problem.limit):
                raise self._make_busy_error(problem.why)
            if newest is None:
                break  # every tenant may queue one
            self._displace(newest)
        tenant = self.tenants.get(name)
        if len(flights) > 1 and tenant is not None and tenant.num_flights > tenant.num_queues:
            num_waiting, num_tokens = self._num_flights - self._num_queues, self._num_all_tokens - self.num_tokens
            if num_waiting + len(flights) - 1 > self.max_requests or num_tokens + num_further > self.max_tokens:
                raise self._make_busy_error(
                    f"{num_waiting} further prompts are waiting, this request has {len(flights)}, the "
                    f"limits are {self.max_requests} and {self.max_tokens} tokens"
                )

    def _find_reached_limit(self, num_tokens: int) -> _ReachedLimit | None:
        """Return the limit that one more prompt would exceed."""
        if self._num_queues >= self.max_requests:
            return _ReachedLimit(
                f"{self._num_queues} requests are waiting, the limit is {self.max_requests}",
                self.max_requests,
                1,
                lambda tenant: tenant.num_queues,
            )
        if self._num_queues and self.num_tokens + num_tokens > self.max_tokens:
            return _ReachedLimit(
                f"{self.num_tokens} prompt tokens are waiting, the limit is {self.max_tokens}",
                self.max_tokens,
                num_tokens,
                lambda tenant: tenant.num_tokens,
            )
        return None

    def _find_displaceable(
        self, count_by_tenant: Mapping[str, int], shares: Mapping[str, float], limit: int, name_of_new: str
    ) -> PromptQueue | None:
        """Return the newest unstarted request of the tenant furthest over its share."""
        over = {
            name: count / (shares[name] * limit)
            for name, count in count_by_tenant.items()
            if name != name_of_new
            and count > shares[name] * limit
            and self.tenants[name].num_queues > 1
            and self.tenants[name].newest_unstarted is not None
        }
        return self.tenants[max(over, key=over.__getitem__)].newest_unstarted if over else None

    def _displace(self, queue: PromptQueue) -> None:
        flights = list(queue.flights)
        error = self._make_busy_error("this request was displaced by one of a tenant below its share")
        for flight in flights:
            self.leave(flight)
            self.pace.leave(flight)
            flight.fail(error)

    def _make_busy_error(self, why: str) -> Busy:
        self.num_refused += 1
        retry = self.retry_after_s()
        return Busy(f"the server is busy: {why}; try again in {retry} s, or raise the limit", retry)

    def retry_after_s(self) -> int:
        """Estimate when half of the queue will be gone at the present throughput."""
        throughput = self.throughput.per_s()
        return min(MAX_RETRY_S, max(1, math.ceil((len(self) / 2 + 1) / throughput))) if throughput else 1

    def leave(self, flight: InFlightRequest) -> bool:
        """Remove a request; False if it was not waiting."""
        queue = flight.queue
        if queue is None or flight not in queue.flights:
            return False
        self._take(flight)
        return True

    def peek(self) -> InFlightRequest | None:
        """Return the request that `next` would take."""
        tenant = self._find_next_tenant()
        return None if tenant is None else tenant.first.first

    def peek_new(self) -> InFlightRequest | None:
        """Return the same tenant's oldest request of which nothing has started."""
        tenant = self._find_next_tenant()
        queue = None if tenant is None else tenant.oldest_unstarted
        return None if queue is None else queue.first

    def promote(self, flight: InFlightRequest) -> None:
        """Give the request its tenant's next turn."""
        if flight.queue is not None:
            self.tenants[flight.tenant].promote(flight.queue)

    def next(self, placement: Placement | None = None) -> InFlightRequest | None:
        """Dequeue the next request of the tenant served least; None if its requests wait for certain engines."""
        tenant = self._find_next_tenant()
        queue = None if tenant is None else tenant.first if placement is None else tenant.choose(placement)
        if tenant is None or queue is None:
            return None
        self.fair_shares.serve(tenant.name)
        flight = queue.first
        tenant.begin(queue)
        self._take(flight)
        if not flight.is_charged:
            flight.is_charged = True
            self.fair_shares.charge(flight.tenant, len(flight.request.tokens))
        return flight

    def _find_next_tenant(self) -> TenantQueue | None:
        name = self.fair_shares.pick(self.tenants)
        return None if name is None else self.tenants[name]

    def _take(self, flight: InFlightRequest) -> None:
        queue = flight.queue
        assert queue is not None
        tenant = self.tenants[flight.tenant]
        del queue.flights[flight]
        if not queue.flights:
            tenant.remove(queue)
        self._count(tenant, queue, -1, -len(flight.request.tokens))
        if not tenant.num_flights:
            del self.tenants[tenant.name]

    def _count(self, tenant: TenantQueue, queue: PromptQueue, num_flights: int, num_tokens: int) -> None:
        num_queues, head = queue.recount()
        tenant.num_queues += num_queues
        tenant.num_tokens += head
        tenant.num_flights += num_flights
        self._num_queues += num_queues
        self.num_tokens += head
        self._num_flights += num_flights
        self._num_all_tokens += num_tokens


class _ReachedLimit(NamedTuple):
    """A limit that is reached, and how tenants count against it."""

    why: str
    limit: int
    needed: int
    count: Callable[[TenantQueue], int]
