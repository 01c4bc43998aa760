"""Requests on their way into an engine, out of it, and from one that died into the next."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from penstock.engine.messages import Abort, Add
from penstock.errors import EngineFailed, InvalidRequest, PenstockError
from penstock.server.admission import Admission
from penstock.server.flight import Flight, Part
from penstock.server.occupancy import Occupancy
from penstock.server.trials import Trials
from penstock.types import Delta

log = logging.getLogger("penstock.engine")

MAX_PART_SIBLINGS = 8  # that enter an engine together and share their prompt's state from the first
PARTS = 8  # that there is room for in an engine, at least
AHEAD = 8  # sequences that an engine has beyond those it can run, so that it never waits for one


class Traffic:
    """`send` tells the engine; without one, or before it is open, everything waits."""

    def __init__(self, admission: Admission, send: Callable[[Add | Abort], None]) -> None:
        self.admission = admission
        self.trials = Trials()
        self.parts = Occupancy()  # in the engine
        self.flights: dict[str, Flight] = {}  # of which at least a part has begun
        self._held: deque[Part] = deque()  # lost with an engine, not yet in the next
        self._max_rows: int | None = None  # of the engine that there is
        self._send = send

    def open(self, max_rows: int, cache_tokens: int = 0) -> None:
        """An engine is ready that runs so many sequences at once."""
        self._max_rows = max_rows
        self.admission.order.open(cache_tokens)
        self.trials.open(time.monotonic())
        self.dispatch()

    def submit(self, *flights: Flight) -> None:
        """Queue the prompts of one client request, all or none; Busy where there is no room."""
        self.admission.enter(*flights)
        self.dispatch()

    def abort(self, *flights: Flight) -> None:
        """Nobody listens any more; within one step their blocks are free."""
        for flight in flights:
            flight.outputs.clear()
            self._drop(flight)
            self.flights.pop(flight.request.id, None)
        self.dispatch()

    # out of the engine

    def take(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            part = self.parts.get(delta.request_id)
            if part is not None and delta.sibling in part.siblings:
                self._take(part, delta)
        self.dispatch()

    def _take(self, part: Part, delta: Delta) -> None:
        flight = part.flight
        part.num_tokens += len(delta.tokens)
        self.admission.charge(flight.tenant, num_output=len(delta.tokens))
        if not self._tell(part, delta):
            self._drop(flight)  # one failure ends the request; its siblings still run
            self._end(flight)
            return
        if delta.sibling not in flight.outputs:
            self.parts.end_sibling(part, delta.sibling)
        self.trials.note(part)
        if not part.siblings:
            self.parts.remove(part)
            self.trials.drop(part)
        if not flight.open:
            self._end(flight)

    def _tell(self, part: Part, delta: Delta) -> bool:
        """Hand a delta to those who listen; False where that is an end by an error."""
        try:
            if part.flight.take(delta):
                self._send(Abort(part.id, delta.sibling, "stop"))
        except Exception as error:
            log.exception("the text of an answer cannot be made")
            part.flight.fail(
                EngineFailed(f"the text of the answer could not be made ({type(error).__name__}): see the server's log")
            )
            return False
        return delta.error is None

    def refuse(self, id: str, error: str) -> None:
        """The engine can never serve it."""
        part = self.parts.get(id)
        if part is not None:
            self.parts.remove(part)
            self._fail(part.flight, InvalidRequest(error))
            self.dispatch()

    def lose(self, was_ready: bool) -> None:
        """The engine died: its requests wait for the next one."""
        self._max_rows = None
        lost, condemned = self.trials.lose(self.parts.clear(), was_ready)
        self._held.extend(lost)
        for part in condemned:
            self._fail(
                part.flight,
                EngineFailed("this request ended the engine process each time it was tried; it is not tried again"),
            )

    def fail_all(self, error: PenstockError) -> None:
        self._max_rows = None
        for flight in {*self.flights.values(), *self.admission}:
            self._fail(flight, error)

    def _fail(self, flight: Flight, error: PenstockError) -> None:
        self._drop(flight)
        flight.fail(error)
        self._end(flight)

    def _drop(self, flight: Flight) -> None:
        """Take out whatever of a flight waits or runs."""
        self.admission.leave(flight)
        flight.parts.clear()
        if flight.request.id not in self.flights:
            return
        for part in [part for part in self.parts if part.flight is flight]:
            self.parts.remove(part)
            self.trials.drop(part)
            self._send(Abort(part.id))
        for part in [part for part in (*self._held, *self.trials) if part.flight is flight]:
            self.trials.drop(part)
            if part in self._held:
                self._held.remove(part)

    def _end(self, flight: Flight) -> None:
        if self.flights.pop(flight.request.id, None) is not None:
            self.admission.pace.count()

    # into the engine

    def dispatch(self) -> None:
        """Hand the engine what it can take: first those that lost an engine, then suspects, then those that wait."""
        if self._max_rows is None:
            return
        while self._held:
            self._begin(self._held.popleft())
        if len(self.trials):
            for part in self.trials.next_group(time.monotonic()):
                self._begin(part)
        max_rows = self._max_rows
        while len(self.admission) and (self.parts.num_rows < max_rows + AHEAD or self._recall(max_rows)):
            self._begin_next(max(1, min(MAX_PART_SIBLINGS, max_rows // PARTS)))

    def _begin_next(self, size: int) -> None:
        flight = self.admission.next()
        assert flight is not None
        part = flight.parts.popleft()
        rest = part.split(size)
        if rest is not None:
            flight.parts.appendleft(rest)
        if flight.parts:
            self.admission.put_back(flight)
        self.flights[flight.request.id] = flight
        self._begin(part)

    def _begin(self, part: Part) -> None:
        if not part.flight.open:
            return
        outputs, request = part.outputs, part.begin()
        if self.admission.is_shared:
            request = replace(request, priority=0)  # among tenants it decides nothing
        self.parts.add(part)
        self._send(Add(request, outputs, part.flight.mus or None))

    def _recall(self, max_rows: int) -> bool:
        """Take parts back for the flight that is next, or for one of a request of which nothing runs."""
        flight, fresh = self.admission.peek(), self.admission.peek_fresh()
        if flight is not None and self._recall_for(flight, max_rows):
            return True
        if fresh is None or fresh is flight or not self._recall_for(fresh, max_rows):
            return False
        self.admission.promote(fresh)
        return True

    def _recall_for(self, flight: Flight, max_rows: int) -> bool:
        """Take parts back, to go on later, for a flight that is entitled to a row; whether there were any."""
        shares = self.admission.shares([flight.tenant, *self.parts.tenants])
        parts = self.parts.find_recalls(flight, shares, max_rows, self.trials.__contains__)
        for part in parts:
            self.parts.remove(part)
            self._send(Abort(part.id))
            part.note_recall()
            part.flight.parts.appendleft(part)
            self.admission.put_back(part.flight)
        return bool(parts)
