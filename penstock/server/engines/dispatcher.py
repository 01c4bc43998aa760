"""Dispatch requests to an engine, route its deltas back, and move requests to the next engine after a crash."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from penstock.engine.messages import Abort, Add, Mark
from penstock.errors import EngineFailed, InvalidRequest, PenstockError
from penstock.server.engines.admission import AdmissionQueue
from penstock.server.engines.direct import UnwrittenDeltas
from penstock.server.engines.in_flight import STARTED_COST, InFlightRequest, Occupancy, RequestPart
from penstock.types import Delta

SUSPECT_DEATHS = 2
SOLID_TOKENS = 8  # of progress that clear a part
MAX_STRIKES = 3
MAX_TRIALS_LOST = 12  # for parts that progress a little each time
QUIET_S = 1.0  # an engine must survive before a trial: the control of the experiment
TRIAL_S = 5.0  # first inconclusive trial; each further one lasts twice as long
log = logging.getLogger("penstock.engine")
MAX_PART_SIBLINGS = 8  # sent to the engine together, to share the prompt's KV blocks
MIN_PARTS = 8  # that fit into an engine
MAX_TENANTS_SHOWN = 8  # of those that a request is queued behind
MAX_AHEAD = 8  # sequences queued in the engine beyond those it can run, so that it never idles
MAX_SLOTLESS = 256  # beyond them, that wait in the engine for a slot for their adapters


class Quarantine:
    """Suspects, and parts on trial."""

    def __init__(self) -> None:
        self._suspects: deque[RequestPart] = deque()  # waiting
        self._tried: dict[RequestPart, float] = {}  # in the engine, with the end of their trial
        self._next_trial_s = 0.0

    def __len__(self) -> int:
        return len(self._suspects)

    def __iter__(self) -> Iterator[RequestPart]:
        return iter(list(self._suspects))

    def __contains__(self, part: RequestPart) -> bool:
        return part in self._tried

    @property
    def has_trials(self) -> bool:
        return bool(self._tried)

    def open(self, now: float) -> None:
        """Start over with a new engine."""
        self._next_trial_s = now + QUIET_S

    def next_group(self, now: float) -> list[RequestPart]:
        if self._tried or not self._suspects or now < self._next_trial_s:
            return []
        group: list[RequestPart] = []
        limit = len(self._suspects)
        while self._suspects and len(group) < (limit := min(limit, self._suspects[0].max_group)):
            group.append(self._suspects.popleft())
        for part in group:
            part.trial_s = part.trial_s or TRIAL_S
            self._tried[part] = now + part.trial_s
        return group

    def clear_if_progressed(self, part: RequestPart) -> None:
        if part in self._tried and part.num_tokens >= SOLID_TOKENS:
            self._tried.pop(part)
            _clear(part)
            part.trial_s = 0.0

    def expire(self, now: float) -> None:
        """End inconclusive trials; called only while the engine makes steps."""
        for part in [part for part, end in self._tried.items() if now > end]:
            self._tried.pop(part)
            _clear(part)
            part.num_deaths = SUSPECT_DEATHS - 1
            part.trial_s *= 2

    def drop(self, part: RequestPart) -> None:
        if self._tried.pop(part, None) is None and part in self._suspects:
            self._suspects.remove(part)

    def handle_death(self, lost: Iterable[RequestPart], was_ready: bool) -> tuple[list[RequestPart], list[RequestPart]]:
        """Judge the parts of a dead engine; return those to resend and those to fail."""
        tried, self._tried = list(self._tried), {}
        others = [part for part in lost if part not in set(tried)]
        if tried:
            return others, self._blame(tried)
        if was_ready:
            for part in self._suspects:
                part.num_strikes = part.num_trials_lost = 0
        for part in others:
            part.num_deaths = 1 if part.num_tokens >= SOLID_TOKENS else part.num_deaths + 1
        suspects = [part for part in others if part.num_deaths >= SUSPECT_DEATHS]
        for part in suspects:
            part.max_group = max(1, (len(suspects) + 1) // 2)
        self._suspects.extend(suspects)
        return [part for part in others if part.num_deaths < SUSPECT_DEATHS], []

    def _blame(self, tried: list[RequestPart]) -> list[RequestPart]:
        for part in tried:
            part.max_group = max(1, len(tried) // 2)
        if len(tried) == 1:
            part = tried[0]
            part.num_trials_lost += 1
            part.num_strikes = 0 if part.num_tokens else part.num_strikes + 1
            if part.num_strikes >= MAX_STRIKES or part.num_trials_lost >= MAX_TRIALS_LOST:
                return [part]
        self._suspects.extend(tried)
        return []


def _clear(part: RequestPart) -> None:
    part.num_deaths = part.num_strikes = part.num_trials_lost = 0
    part.max_group = 1 << 30


def _report_output(error: Exception) -> EngineFailed:
    log.exception("cannot detokenize an output")
    return EngineFailed(f"cannot detokenize the output ({type(error).__name__}): see the server's log")


def _describe_rows(parts: Occupancy, max_rows: int | None) -> tuple[str, dict[str, int]]:
    """Say what a request waits for in the engine: the step under way, or those who have the rows."""
    if max_rows is None or parts.num_rows < max_rows:
        return "a step was under way" if parts.num_rows else "", {}
    return f"behind {parts.num_rows} answers in the engine", parts.count_tenants(MAX_TENANTS_SHOWN)


class Dispatcher:
    """Requests between admission queue and engine; `send` sends a command. Everything waits until `open`."""

    def __init__(self, admission: AdmissionQueue, send: Callable[[Add | Abort], None]) -> None:
        self.admission = admission
        self.quarantine = Quarantine()
        self.parts = Occupancy()  # sent to the engine
        self.flights: dict[str, InFlightRequest] = {}  # with at least one part started
        self.unwritten = UnwrittenDeltas()
        self._lost: deque[RequestPart] = deque()  # lost in a crash, not yet resent
        self._max_rows: int | None = None  # of the present engine
        self._num_slots = 0  # for adapters
        self._send = send

    def open(self, max_rows: int, cache_tokens: int = 0, num_slots: int = 0) -> None:
        """Start dispatching to an engine that runs `max_rows` sequences at once, with `num_slots` sets of adapters."""
        self._max_rows, self._num_slots = max_rows, num_slots
        self.admission.order.reset(cache_tokens)
        self.admission.pace.restart()
        self.quarantine.open(time.monotonic())
        self.dispatch()

    def submit(self, *flights: InFlightRequest) -> None:
        """Queue the prompts of one client request, all or none; Busy if the queue is full or too slow."""
        why, tenants = self._describe_queue()
        self.admission.enter(*flights)
        for flight in flights:
            flight.follow(flight.outputs, "queue", why, tenants)
        self.dispatch()

    def _describe_queue(self) -> tuple[str, dict[str, int]]:
        """Say behind whom a request is queued."""
        num_waiting = len(self.admission)
        if self._max_rows is None:
            return "the engine was starting", {}
        if not num_waiting:
            return "", {}
        tenants = sorted(self.admission.tenants.values(), key=lambda tenant: -tenant.num_flights)[:MAX_TENANTS_SHOWN]
        return f"behind {num_waiting} requests", {tenant.name: tenant.num_flights for tenant in tenants}

    def abort(self, *flights: InFlightRequest) -> None:
        """Stop requests that nobody listens to; their blocks are free within one step."""
        for flight in flights:
            flight.follow(list(flight.outputs), None)
            flight.outputs.clear()
            self._drop(flight)
            self.flights.pop(flight.request.id, None)
        self.dispatch()

    def handle_marks(self, marks: Iterable[Mark]) -> None:
        """Add what the engine noted to the timelines of requests."""
        for mark in marks:
            part = self.parts.get(mark.request_id)
            if part is not None and mark.kind == "prepared":
                for sibling in part.siblings:
                    part.flight.trace.mark((part.flight.number, sibling), mark)
            elif part is not None and mark.sibling in part.siblings:
                part.flight.trace.mark((part.flight.number, mark.sibling), mark)

    def handle_deltas(self, deltas: Iterable[Delta]) -> None:
        find, has_trials = self.parts.get, self.quarantine.has_trials
        num_written: dict[str, int] = {}  # tokens by tenant
        for delta in deltas:
            part = find(delta.request_id)
            if part is None or delta.sibling not in part.siblings:
                continue
            flight = part.flight
            try:
                is_taken = delta.is_token and not has_trials and flight.push_token(delta)
            except Exception as error:
                self._fail(flight, _report_output(error))
                continue
            if is_taken:
                part.num_tokens += 1
                num_written[flight.tenant] = num_written.get(flight.tenant, 0) + 1
            else:
                self._handle_delta(part, delta)
        for tenant, num_tokens in num_written.items():
            self.admission.fair_shares.charge(tenant, num_output=num_tokens)
        self.dispatch()

    def _handle_delta(self, part: RequestPart, delta: Delta) -> None:
        flight = part.flight
        self.admission.pace.finish(flight)
        part.num_tokens += len(delta.tokens)
        self.admission.fair_shares.charge(flight.tenant, num_output=len(delta.tokens))
        if not self._deliver(part, delta):
            self._drop(flight)  # one failure ends the whole request
            self._end(flight)
            return
        if delta.sibling not in flight.outputs:
            self.parts.end_sibling(part, delta.sibling)
        self.quarantine.clear_if_progressed(part)
        if not part.siblings:
            self.parts.remove(part)
            self.quarantine.drop(part)
        if not flight.is_open:
            self._end(flight)

    def _deliver(self, part: RequestPart, delta: Delta) -> bool:
        """Pass a delta on; False if the request failed."""
        try:
            if part.flight.push(delta):
                self._send(Abort(part.id, delta.sibling, "stop"))
        except Exception as error:
            part.flight.fail(_report_output(error))
            return False
        return delta.error is None

    def refuse(self, id: str, error: str) -> None:
        """Fail a request that the engine can never serve."""
        part = self.parts.get(id)
        if part is not None:
            self.parts.remove(part)
            self._fail(part.flight, InvalidRequest(error))
            self.dispatch()

    def handle_death(self, was_ready: bool) -> None:
        """Keep a dead engine's requests for the next one, except those that crash it."""
        self._max_rows = None
        lost, condemned = self.quarantine.handle_death(self.parts.clear(), was_ready)
        self._lost.extend(lost)
        for part in (*lost, *self.quarantine):
            part.flight.trace.num_restarts += 1
            part.flight.follow(part.siblings, "restart", "the engine died and was restarted")
        for part in condemned:
            self._fail(part.flight, EngineFailed("this request crashed the engine each time it ran; it is not retried"))

    def fail_all(self, error: PenstockError) -> None:
        self._max_rows = None
        for flight in {*self.flights.values(), *self.admission}:
            self._fail(flight, error)

    def _fail(self, flight: InFlightRequest, error: PenstockError) -> None:
        self._drop(flight)
        flight.fail(error)
        self._end(flight)

    def _drop(self, flight: InFlightRequest) -> None:
        """Remove all parts of a request, waiting or running."""
        self.admission.leave(flight)
        self.admission.pace.leave(flight)
        flight.parts.clear()
        if flight.request.id not in self.flights:
            return
        for part in [part for part in self.parts if part.flight is flight]:
            self.parts.remove(part)
            self.quarantine.drop(part)
            self._send(Abort(part.id))
        for part in [part for part in (*self._lost, *self.quarantine) if part.flight is flight]:
            self.quarantine.drop(part)
            if part in self._lost:
                self._lost.remove(part)

    def _end(self, flight: InFlightRequest) -> None:
        if self.flights.pop(flight.request.id, None) is not None:
            self.admission.throughput.count()

    def dispatch(self) -> None:
        """Send what the engine can take: parts lost in a crash, then suspects, then waiting requests."""
        if self._max_rows is None:
            return
        while self._lost:
            self._start(self._lost.popleft())
        if len(self.quarantine):
            for part in self.quarantine.next_group(time.monotonic()):
                self._start(part)
        size = max(1, min(MAX_PART_SIBLINGS, self._max_rows // MIN_PARTS))
        while len(self.admission):
            slotless = min(self.parts.count_slotless(self._num_slots), MAX_SLOTLESS)  # they take no rows
            max_rows = self._max_rows + slotless
            if self.parts.num_rows >= max_rows + MAX_AHEAD and not self._preempt(max_rows):
                return
            self._start_next(size)

    def _start_next(self, size: int) -> None:
        flight = self.admission.next()
        assert flight is not None
        part = flight.parts.popleft()
        rest = part.split(size)
        if rest is not None:
            flight.parts.appendleft(rest)
        if flight.parts:
            self.admission.put_back(flight)
        self.flights[flight.request.id] = flight
        self._start(part)

    def _start(self, part: RequestPart) -> None:
        if not part.flight.is_open:
            return
        outputs, request = part.outputs, part.next_request()
        if self.admission.fair_shares.is_shared:
            request = replace(request, priority=0)  # no effect across tenants
        why, tenants = _describe_rows(self.parts, self._max_rows)
        self.parts.add(part)
        if request.is_guided:
            part.flight.follow(part.siblings, "grammar")
        else:
            part.flight.follow(part.siblings, "wait", why, tenants)
        self._send(Add(request, outputs, part.flight.mus or None))

    def _preempt(self, max_rows: int) -> bool:
        """Preempt parts for the next request, or for the oldest unstarted one."""
        flight, fresh = self.admission.peek(), self.admission.peek_new()
        if flight is not None and self._preempt_for(flight, max_rows):
            return True
        if fresh is None or fresh is flight or not self._preempt_for(fresh, max_rows):
            return False
        self.admission.promote(fresh)
        return True

    def _preempt_for(self, flight: InFlightRequest, max_rows: int) -> bool:
        """Preempt parts, to resume later, for a request entitled to a row; True if any."""
        shares = self.admission.fair_shares.divide([*self.admission.tenants, flight.tenant, *self.parts.tenants])
        parts = self.parts.find_preemptible(flight, shares, max_rows, self.quarantine.__contains__)
        for part in parts:
            self.parts.remove(part)
            self._send(Abort(part.id))
            part.preemption_cost += STARTED_COST if part.num_tokens else 1
            part.flight.parts.appendleft(part)
            part.flight.follow(part.siblings, "queue", "it gave its row back", {flight.tenant: 1})
            self.admission.put_back(part.flight)
        return bool(parts)


def add_energy(dispatcher: Dispatcher, energy_j: Mapping[str, float]) -> None:
    """Add joules to the requests that they were used for."""
    for id, joules in energy_j.items():
        part = dispatcher.parts.get(id)
        if part is not None:
            part.flight.trace.energy_j = (part.flight.trace.energy_j or 0.0) + joules
