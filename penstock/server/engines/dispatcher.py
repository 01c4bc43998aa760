"""Dispatch requests to the engines of a model, route their deltas back, and move requests on after a crash."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from penstock.engine.messages import HANDED_OVER, Abort, Add, Mark
from penstock.errors import EngineFailed, InvalidRequest, PenstockError
from penstock.server.config import PREFILL
from penstock.server.engines.admission import AdmissionQueue
from penstock.server.engines.direct import UnwrittenDeltas
from penstock.server.engines.in_flight import STARTED_COST, InFlightRequest, Occupancy, RequestPart
from penstock.server.engines.replica import Replica, Replicas, can_hand_over
from penstock.server.observe.ranks import RankLoss
from penstock.types import Delta

log = logging.getLogger("penstock.engine")
MAX_PART_SIBLINGS = 8  # sent to an engine together, to share the prompt's KV blocks
MIN_PARTS = 8  # that fit into an engine
MAX_TENANTS_SHOWN = 8  # of those that a request is queued behind


def _report_output(error: Exception) -> EngineFailed:
    log.exception("cannot detokenize an output")
    return EngineFailed(f"cannot detokenize the output ({type(error).__name__}): see the server's log")


def _describe_rows(replica: Replica, parts: Occupancy, has_others: bool) -> tuple[str, dict[str, int]]:
    """Say what a request waits for in the engine: the step under way, or those who have the rows."""
    where = f" of replica {replica.number}" if has_others else ""
    if replica.max_rows is None or replica.num_rows < replica.max_rows:
        why = "a step was under way" if replica.num_rows else ""
        return f"{why} on replica {replica.number}".lstrip() if has_others else why, {}
    return f"behind {replica.num_rows} answers in the engine{where}", parts.count_tenants(MAX_TENANTS_SHOWN)


def _describe_queue(admission: AdmissionQueue, is_open: bool) -> tuple[str, dict[str, int]]:
    """Say behind whom a request is queued."""
    if not is_open:
        return "the engine was starting", {}
    if not len(admission):
        return "", {}
    tenants = sorted(admission.tenants.values(), key=lambda tenant: -tenant.num_flights)[:MAX_TENANTS_SHOWN]
    return f"behind {len(admission)} requests", {tenant.name: tenant.num_flights for tenant in tenants}


class Dispatcher:
    """Requests between the admission queue and the engines of a model. Everything waits until one is open."""

    def __init__(self, admission: AdmissionQueue) -> None:
        self.admission = admission
        self.replicas = Replicas()
        self.parts = Occupancy()  # sent to engines
        self.flights: dict[str, InFlightRequest] = {}  # with at least one part started
        self.unwritten = UnwrittenDeltas()
        self._lost: deque[RequestPart] = deque()  # lost in a crash, not yet resent
        self._held: tuple[int, ...] | None = None  # the load when all were left waiting

    def open(self, replica: Replica, max_rows: int, cache_tokens: int = 0) -> None:
        """Start dispatching to an engine that runs `max_rows` sequences at once."""
        if not any(one.is_open for one in self.replicas):
            self.admission.pace.restart()
        self.admission.order.reset(cache_tokens * len(self.replicas))
        replica.open(max_rows, cache_tokens, time.monotonic())
        self.dispatch()

    def submit(self, *flights: InFlightRequest) -> None:
        """Queue the prompts of one client request, all or none; Busy if the queue is full or too slow."""
        why, tenants = _describe_queue(self.admission, self.replicas.max_rows > 0)
        self.admission.enter(*flights)
        for flight in flights:
            flight.follow(flight.outputs, "queue", why, tenants)
        self.dispatch()

    def abort(self, *flights: InFlightRequest) -> None:
        """Abort requests whose clients are gone; their blocks are free within one step."""
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
        find, has_trials = self.parts.get, self.replicas.has_trials
        num_written: dict[str, int] = {}  # tokens by tenant
        for delta in deltas:
            part = find(delta.request_id)
            if part is not None and part.flight.request.beam and delta.sibling:
                part.flight.collector.push(delta)  # a beam beside the best one, whose delta comes last
                continue
            if part is None or delta.sibling not in part.siblings:
                continue
            flight = part.flight
            try:
                is_taken = delta.is_token and not has_trials and flight.push_token(delta)
            except Exception as error:
                self._fail(flight, _report_output(error))
                continue
            if is_taken:
                if not part.num_tokens:  # since it was moved to this engine
                    part.engine.begin(part)
                part.num_tokens += 1
                num_written[flight.tenant] = num_written.get(flight.tenant, 0) + 1
            else:
                self._handle_delta(part, delta)
        for tenant, num_tokens in num_written.items():
            self.admission.fair_shares.charge(tenant, num_output=num_tokens)
        self.dispatch()

    def _handle_delta(self, part: RequestPart, delta: Delta) -> None:
        flight = part.flight
        is_handed_over = delta.finish_reason == HANDED_OVER and not flight.request.hand_over
        if is_handed_over:
            delta = msgspec.structs.replace(delta, finish_reason=None)
        elif delta.finish_reason == HANDED_OVER:  # to another server
            flight.handed_over_at = part.engine.transfer_port
        self.admission.pace.finish(flight)
        part.num_tokens += len(delta.tokens)
        part.engine.begin(part)
        self.admission.fair_shares.charge(flight.tenant, num_output=len(delta.tokens))
        if not self._deliver(part, delta):
            self._drop(flight)  # one failure ends the whole request
            self._end(flight)
            return
        replica = part.engine
        if delta.sibling not in flight.outputs:
            self.parts.end_sibling(part, delta.sibling)
        replica.quarantine.clear_after_progress(part)
        if is_handed_over and delta.sibling in flight.outputs:
            self.parts.end_sibling(part, delta.sibling)
            self._lost.append(RequestPart(flight, [delta.sibling]))
        if not part.siblings:
            self._take_back(part)
        if not flight.is_open:
            self._end(flight)

    def _deliver(self, part: RequestPart, delta: Delta) -> bool:
        """Pass a delta on; False if the request failed."""
        try:
            if part.flight.push(delta):
                part.engine.send(Abort(part.id, delta.sibling, "stop"))
        except Exception as error:
            part.flight.fail(_report_output(error))
            return False
        return delta.error is None

    def refuse(self, id: str, error: str) -> None:
        """Fail a request that the engine can never serve."""
        part = self.parts.get(id)
        if part is not None:
            self._take_back(part)
            self._fail(part.flight, InvalidRequest(error))
            self.dispatch()

    def handle_death(self, replica: Replica, was_ready: bool, loss: RankLoss | None = None) -> None:
        """Keep a dead engine's requests for the others or its successor, except those that crash it."""
        parts = [part for part in self.parts if part.engine is replica]
        for part in parts:
            self.parts.remove(part)
        replica.clear()
        lost, condemned = replica.quarantine.handle_death(parts, was_ready)
        handed = [part for part in lost if part.flight.request.hand_over]  # their servers need not wait
        self._lost.extend(part for part in lost if part not in handed)
        why = "the engine died and was restarted" if loss is None else loss.explain()
        for part in (*lost, *replica.quarantine):
            part.flight.trace.restart(loss)
            part.flight.follow(part.siblings, "restart", why)
        for part in handed:
            self._fail(part.flight, EngineFailed("the engine of this prompt died: have it computed elsewhere"))
        for part in condemned:
            self._fail(part.flight, EngineFailed("this request crashed the engine each time it ran; it is not retried"))
        self.dispatch()

    def fail_all(self, error: PenstockError) -> None:
        for replica in self.replicas:
            replica.max_rows = None
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
            self._take_back(part)
            part.engine.send(Abort(part.id))
        for part in [part for part in self._lost if part.flight is flight]:
            self._lost.remove(part)
        for replica in self.replicas:
            for part in [part for part in replica.quarantine if part.flight is flight]:
                replica.quarantine.drop(part)

    def _take_back(self, part: RequestPart) -> None:
        """Forget a part that no longer runs."""
        if self.parts.remove(part):
            part.engine.remove(part)
            part.engine.quarantine.drop(part)

    def _end(self, flight: InFlightRequest) -> None:
        if self.flights.pop(flight.request.id, None) is not None:
            self.admission.throughput.count()

    def dispatch(self) -> None:
        """Send what the engines can take: parts lost in a crash, then suspects, then waiting requests."""
        if not self.replicas.max_rows:
            return
        while self._lost:
            part = self._lost.popleft()
            self._start(part, self.replicas.choose(part.flight))
        for replica in self.replicas:
            if replica.is_open and len(replica.quarantine):
                for part in replica.quarantine.next_group(time.monotonic()):
                    self._start(part, replica)
        if self._held is not None and self._held == self.replicas.measure(len(self.admission)):
            return
        self._held = None
        placement = self.replicas if len(self.replicas) > 1 else None
        while self._held is None and len(self.admission):
            if self.replicas.has_room:
                self._held = None if self._start_next(placement) else self.replicas.measure(len(self.admission))
            elif self._preempt():
                self._start_next(None)
            else:
                return

    def _start_next(self, placement: Replicas | None) -> bool:
        """Send the next request; False if those that could be next had better wait for engines without room."""
        flight = self.admission.next(placement)
        if flight is None:
            return False
        replica = self.replicas.choose_with_room(flight)
        part = flight.parts.popleft()
        rest = part.split(max(1, min(MAX_PART_SIBLINGS, (replica.max_rows or 1) // MIN_PARTS)))
        if rest is not None:
            flight.parts.appendleft(rest)
        if flight.parts:
            self.admission.put_back(flight)
        self.flights[flight.request.id] = flight
        self._start(part, replica)
        return True

    def _start(self, part: RequestPart, replica: Replica) -> None:
        flight = part.flight
        if not flight.is_open:
            return
        outputs, request = part.outputs, part.next_request()
        if self.admission.fair_shares.is_shared:
            request = replace(request, priority=0)  # no effect across tenants
        if replica.role == PREFILL and self.replicas.can_answer and can_hand_over(request) and outputs is None:
            request = replace(request, hand_over=True)
        has_others = len(self.replicas) > 1
        why, tenants = _describe_rows(replica, self.parts, has_others)
        part.replica = replica
        self.parts.add(part)
        replica.add(part, self.replicas.digest(flight))
        if has_others:
            flight.trace.place(replica.number)
        if replica.ranks:
            flight.trace.place_on_ranks(replica.number, replica.ranks)
        if request.is_guided:
            flight.follow(part.siblings, "grammar")
        else:
            flight.follow(part.siblings, "wait", why, tenants)
        replica.send(Add(request, outputs, flight.mus or None))

    def _preempt(self) -> bool:
        """Preempt parts for the next request, or for the oldest unstarted one."""
        flight, fresh = self.admission.peek(), self.admission.peek_new()
        if flight is not None and self._preempt_for(flight):
            return True
        if fresh is None or fresh is flight or not self._preempt_for(fresh):
            return False
        self.admission.promote(fresh)
        return True

    def _preempt_for(self, flight: InFlightRequest) -> bool:
        """Preempt parts, to resume later, for a request entitled to a row; True if any."""
        shares = self.admission.fair_shares.divide([*self.admission.tenants, flight.tenant, *self.parts.tenants])
        parts = self.parts.find_preemptible(
            flight, shares, self.replicas.most_parts, lambda part: part in part.engine.quarantine
        )
        for part in parts:
            self._take_back(part)
            part.engine.send(Abort(part.id))
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
