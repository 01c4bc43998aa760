"""Queue requests in front of all servers: who may wait, and who goes next.

A server has so many rows; what exceeds them waits here, where the tenant that was served least goes first, whatever
server it goes to. A full queue displaces the newest request of the tenant furthest over its share.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping

from penstock.errors import Busy
from penstock.server.engines.admission import FairShares, Throughput
from penstock.server.engines.prompt_pace import MAX_RETRY_S

MAX_CANDIDATES = 128  # requests of a tenant that are considered for a turn
MAX_TENANTS = 4096  # remembered: without keys of the router's own, clients choose their names


class QueuedCall:
    """A waiting request. `start` takes a place on a server, False if none has room; those of one `kind` fare alike."""

    def __init__(self, tenant: str, num_prompt: int, kind: Hashable, start: Callable[[], bool]) -> None:
        self.tenant, self.num_prompt, self.kind, self.start = tenant, num_prompt, kind, start
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class FleetQueue:
    def __init__(
        self, max_requests: int, weights: Mapping[str, float] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_requests = max_requests
        self.num_refused = 0
        self.fair_shares, self.throughput = FairShares(weights), Throughput(clock)
        self._tenants: dict[str, OrderedDict[QueuedCall, None]] = {}  # with waiting requests
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    async def enter(self, ticket: QueuedCall) -> None:
        """Wait for the request's turn; Busy if it does not fit, or is displaced."""
        name = ticket.tenant
        if name not in self._tenants:
            self.fair_shares.raise_to_level(name)
        self._tenants.setdefault(name, OrderedDict())[ticket] = None
        self._num_waiting += 1
        try:
            self.dispatch()
            if not ticket.turn.done():
                self._shrink(ticket)
            await ticket.turn
        finally:
            self._remove(ticket)

    def dispatch(self) -> None:
        """Give turns to those that servers have room for, the tenant served least first."""
        full: set[Hashable] = set()  # kinds
        stuck: set[str] = set()
        while names := self._tenants.keys() - stuck:
            for each in names:
                self.fair_shares.add(each)
            name = self.fair_shares.pick(names)
            assert name is not None
            ticket = self._start_first(name, full)
            if ticket is None:
                stuck.add(name)
                continue
            self._remove(ticket)
            self.fair_shares.serve(name)
            self.fair_shares.charge(name, ticket.num_prompt)
            ticket.turn.set_result(None)

    def _start_first(self, name: str, full: set[Hashable]) -> QueuedCall | None:
        """Start a tenant's first request that a server has room for; None if there is none."""
        for count, ticket in enumerate(self._tenants[name]):
            if count == MAX_CANDIDATES:
                break
            if ticket.kind in full or ticket.turn.done():
                continue
            if ticket.start():
                return ticket
            full.add(ticket.kind)
        return None

    def end(self, tenant: str, num_output: int, *, has_answer: bool) -> None:
        """Count an answer that has ended, if there was one, and let others begin."""
        if has_answer:
            self.throughput.count()
        self.fair_shares.charge(tenant, num_output=num_output)
        self.fair_shares.forget(self._tenants, MAX_TENANTS)
        self.dispatch()

    def _shrink(self, ticket: QueuedCall) -> None:
        """Displace a request if too many wait: the new one itself, if its tenant has its share."""
        if self._num_waiting <= self.max_requests:
            return
        shares = self.fair_shares.divide(self._tenants)
        over = {name: len(tickets) / shares[name] for name, tickets in self._tenants.items()}
        furthest = max(over, key=lambda name: (over[name], name == ticket.tenant))
        displaced = ticket if furthest == ticket.tenant else next(reversed(self._tenants[furthest]))
        self.num_refused += 1
        retry_s = self.retry_after_s()
        why = (
            f"{self.max_requests} requests are waiting, which is the limit"
            if displaced is ticket
            else "this request was displaced by one of a tenant below its share"
        )
        self._remove(displaced)
        if not displaced.turn.done():
            displaced.turn.set_exception(
                Busy(f"all servers are busy: {why}; try again in {retry_s} s, or raise --max-queued-requests", retry_s)
            )

    def retry_after_s(self) -> int:
        """Estimate when half of the queue will be gone at the fleet's present throughput."""
        throughput = self.throughput.per_s()
        seconds = math.ceil((self._num_waiting / 2 + 1) / throughput) if throughput else 1
        return min(MAX_RETRY_S, max(1, seconds))

    def _remove(self, ticket: QueuedCall) -> None:
        tickets = self._tenants.get(ticket.tenant)
        if tickets is not None and ticket in tickets:
            del tickets[ticket]
            self._num_waiting -= 1
            if not tickets:
                del self._tenants[ticket.tenant]
