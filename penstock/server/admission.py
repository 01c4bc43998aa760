"""Who may wait, and who of those waiting goes next.

Tenants share the engine by virtual token counters: each is charged for what it is given, prompt tokens once and output
tokens twice, divided by its weight; the one that has been given least goes first. A tenant that returns after a pause
starts level with the others, so that idleness saves nothing up. Within a tenant the better priority goes first, and
client requests of equal priority take turns, one prompt at a time, or go as the scheduling policy says.

A tenant may fill all the room there is, but not against others: where there is none left, the newest request of the
tenant that is furthest over its share makes way for one of a tenant below its own.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from penstock.errors import Busy
from penstock.server.flight import Flight
from penstock.server.line import Line, Tenant
from penstock.server.order import make_order

OUTPUT_COST = 2.0
MEMORY_S = 30.0  # over which the pace is measured
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
    """The limits hold for the next prompt of each client request; the further prompts of a body have as much room
    again, and the first such body of a tenant always has room, so that none is refused for its own size alone."""

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        weights: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        policy: str = "fcfs",
    ) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_refused = 0
        self.pace = Pace(clock)
        self.order = make_order(policy)
        self.weights: Mapping[str, float] = {} if weights is None else weights  # changes when keys are read again
        self._tenants: dict[str, Tenant] = {}  # those that wait
        self._spent: dict[str, float] = {}
        self._order: list[tuple[float, str]] = []  # a heap; what a tenant has spent may have grown since
        self._ordered: set[str] = set()  # who is in it
        self._level = 0.0  # what the tenant that went last had spent
        self._num_lines = 0
        self._num_flights = 0
        self.num_tokens = 0  # of the prompts that are next in their requests
        self._num_all_tokens = 0

    def __len__(self) -> int:
        return self._num_flights

    def __iter__(self) -> Iterator[Flight]:
        for tenant in self._tenants.values():
            yield from tenant

    @property
    def is_shared(self) -> bool:
        """True where more than one tenant may ask."""
        return len(self.weights) > 1

    def waits(self, tenant: str) -> bool:
        return tenant in self._tenants

    def shares(self, also: Sequence[str] = ()) -> dict[str, float]:
        """Parts of one whole, by weight, of the tenants that wait and of others."""
        weights = {name: self.weights.get(name, 1.0) for name in (*self._tenants, *also)}
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    # entering

    def enter(self, *flights: Flight) -> None:
        """Queue the prompts of one client request, all or none; Busy where there is no room for them."""
        name = flights[0].tenant
        self._make_room(name, flights)
        if name not in self._tenants:
            self._spent[name] = max(self._spent.get(name, 0.0), self._level)
        tenant = self._tenant(name)
        line = Line(flights)
        for flight in flights:
            flight.line = line
        tenant.add(line)
        self._count(tenant, line, len(flights), sum(len(flight.request.tokens) for flight in flights))

    def put_back(self, flight: Flight) -> None:
        """Queue a flight again that has been taken, as the next of its request, whatever room there is."""
        line = flight.line
        assert line is not None
        if flight not in line.flights:
            tenant = self._tenant(flight.tenant)
            line.put_first(flight)
            tenant.add(line)
            self._count(tenant, line, 1, len(flight.request.tokens))

    def _tenant(self, name: str) -> Tenant:
        if name not in self._tenants:
            self._tenants[name] = Tenant(name, self.order)
            if name not in self._ordered:
                self._ordered.add(name)
                heapq.heappush(self._order, (self._spent.get(name, 0.0), name))
        return self._tenants[name]

    def _make_room(self, name: str, flights: Sequence[Flight]) -> None:
        num_head = len(flights[0].request.tokens)
        num_further = sum(len(flight.request.tokens) for flight in flights) - num_head
        while (problem := self._lack(num_head)) is not None:
            shares = self.shares([name])
            counts = problem.counts(self._tenants.values())
            own = counts.get(name, 0) + problem.needed
            newest = self._newest_over(counts, shares, problem.limit, name)
            if name in self._tenants and (newest is None or own > shares[name] * problem.limit):
                raise self._refuse(str(problem))
            if newest is None:
                break  # each tenant has room for one
            self._displace(newest)
        tenant = self._tenants.get(name)
        if len(flights) > 1 and tenant is not None and tenant.num_flights > tenant.num_lines:
            num_waiting, num_tokens = self._num_flights - self._num_lines, self._num_all_tokens - self.num_tokens
            if num_waiting + len(flights) - 1 > self.max_requests or num_tokens + num_further > self.max_tokens:
                raise self._refuse(
                    f"{num_waiting} further prompts of requests wait, this one has {len(flights)}, the "
                    f"limits are {self.max_requests} and {self.max_tokens} tokens"
                )

    def _lack(self, num_tokens: int) -> _Lack | None:
        """The limit that stands in the way of one more prompt."""
        if self._num_lines >= self.max_requests:
            return _Lack(
                f"{self._num_lines} requests wait, the limit is {self.max_requests}",
                self.max_requests,
                1,
                lambda tenant: tenant.num_lines,
            )
        if self._num_lines and self.num_tokens + num_tokens > self.max_tokens:
            return _Lack(
                f"prompts of {self.num_tokens} tokens wait, the limit is {self.max_tokens}",
                self.max_tokens,
                num_tokens,
                lambda tenant: tenant.num_tokens,
            )
        return None

    def _newest_over(self, counts: Mapping[str, int], shares: Mapping[str, float], limit: int, but: str) -> Line | None:
        """The newest request, not yet begun, of the tenant that is furthest over its share."""
        over = {
            name: count / (shares[name] * limit)
            for name, count in counts.items()
            if name != but
            and count > shares[name] * limit
            and self._tenants[name].num_lines > 1
            and self._tenants[name].newest_fresh is not None
        }
        return self._tenants[max(over, key=over.__getitem__)].newest_fresh if over else None

    def _displace(self, line: Line) -> None:
        flights = list(line.flights)
        error = self._refuse("this request waited, and made way for one of a tenant below its share")
        for flight in flights:
            self.leave(flight)
            flight.fail(error)

    def _refuse(self, why: str) -> Busy:
        self.num_refused += 1
        retry = self.retry_after_s()
        return Busy(f"the server is busy: {why}; try again in {retry} s, or raise the limit", retry)

    def retry_after_s(self) -> int:
        """When a request that comes now would find half of the queue gone, at the present pace."""
        pace = self.pace.per_s()
        return min(MOST_RETRY_S, max(1, math.ceil((len(self) / 2 + 1) / pace))) if pace else 1

    # leaving

    def leave(self, flight: Flight) -> bool:
        """Take one out that will not wait any longer; whether it did wait."""
        line = flight.line
        if line is None or flight not in line.flights:
            return False
        self._take(flight)
        return True

    def peek(self) -> Flight | None:
        """The flight that `next` would take."""
        tenant = self._least_served()
        return None if tenant is None else tenant.first.first

    def peek_fresh(self) -> Flight | None:
        """The first flight of a request of which nothing has begun, of the same tenant."""
        tenant = self._least_served()
        line = None if tenant is None else tenant.oldest_fresh
        return None if line is None else line.first

    def promote(self, flight: Flight) -> None:
        """Let its request have the tenant's next turn."""
        if flight.line is not None:
            self._tenants[flight.tenant].promote(flight.line)

    def next(self) -> Flight | None:
        """The next of the tenant that has been given least, out of the queue."""
        tenant = self._least_served()
        if tenant is None:
            return None
        self._level = max(self._level, self._spent[tenant.name])
        line = tenant.first
        flight = line.first
        tenant.begin(line)
        self._take(flight)
        if not flight.is_charged:
            flight.is_charged = True
            self.charge(flight.tenant, len(flight.request.tokens))
        return flight

    def charge(self, tenant: str, num_prompt: int = 0, num_output: int = 0) -> None:
        cost = (num_prompt + OUTPUT_COST * num_output) / self.weights.get(tenant, 1.0)
        self._spent[tenant] = self._spent.get(tenant, 0.0) + cost

    def _least_served(self) -> Tenant | None:
        while self._order:
            spent, name = self._order[0]
            tenant, now = self._tenants.get(name), self._spent.get(name, 0.0)
            if tenant is None:
                self._ordered.remove(heapq.heappop(self._order)[1])
            elif spent < now:
                heapq.heapreplace(self._order, (now, name))
            else:
                return tenant
        return None

    def _take(self, flight: Flight) -> None:
        line = flight.line
        assert line is not None
        tenant = self._tenants[flight.tenant]
        del line.flights[flight]
        if not line.flights:
            tenant.remove(line)
        self._count(tenant, line, -1, -len(flight.request.tokens))
        if not tenant.num_flights:
            del self._tenants[tenant.name]

    def _count(self, tenant: Tenant, line: Line, num_flights: int, num_tokens: int) -> None:
        """Account for a line that has changed."""
        num_lines, head = line.recount()
        tenant.num_lines += num_lines
        tenant.num_tokens += head
        tenant.num_flights += num_flights
        self._num_lines += num_lines
        self.num_tokens += head
        self._num_flights += num_flights
        self._num_all_tokens += num_tokens


class _Lack:
    """A limit that is reached."""

    def __init__(self, why: str, limit: int, needed: int, count: Callable[[Tenant], int]) -> None:
        self._why, self.limit, self.needed, self._count = why, limit, needed, count

    def __str__(self) -> str:
        return self._why

    def counts(self, tenants: Iterable[Tenant]) -> dict[str, int]:
        return {tenant.name: self._count(tenant) for tenant in tenants}
