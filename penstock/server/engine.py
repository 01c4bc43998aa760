"""An engine that is replaced when it dies: requests in flight go on where they were, token for token."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.engine.messages import Abort, Add, Beat, Deltas, Failed, Forget, Found, Ready, Refused, Report
from penstock.errors import EngineFailed, InvalidModel, InvalidRequest, PenstockError
from penstock.server.admission import Admission
from penstock.server.flight import Flight, Part
from penstock.server.occupancy import Occupancy
from penstock.server.process import WORKER, EngineProcess
from penstock.server.trials import Trials
from penstock.server.vitals import WATCH_S, Backoff, Vitals
from penstock.types import Delta

log = logging.getLogger("penstock.engine")

MAX_FIRST_STARTS = 8        # of an engine that has never been ready; later ones are tried for ever
MAX_PART_SIBLINGS = 8       # that enter an engine together and share their prompt's state from the first
PARTS = 8                   # that there is room for in an engine, at least
AHEAD = 8                   # sequences that an engine has beyond those it can run, so that it never waits for one


class RemoteEngine:
    """`run` is the one task that starts processes and waits for their ends; everything else is called beside it."""

    def __init__(self, name: str, model: str, options: Mapping[str, Any], folder: Path, admission: Admission, *,
                 hang_s: float = 60.0, command: Sequence[str] = WORKER,
                 on_found: Callable[[Found], None] = lambda found: None) -> None:
        self.name, self.model, self.options = name, model, dict(options)
        self.admission = admission
        self.facts: Ready | None = None
        self.failure: str | None = None             # why there will be no engine
        self.stats: dict[str, float] = {}
        self.num_restarts = 0
        self._before: dict[str, float] = {}         # counters of the processes that died
        self.flights: dict[str, Flight] = {}        # of which at least a part has begun
        self._parts = Occupancy()
        self._folder, self._command, self._on_found = folder, command, on_found
        self._process: EngineProcess | None = None
        self._loaded = asyncio.Event()              # ready or failed for good
        self._up = False
        self._closing = asyncio.Event()
        self._held: deque[Part] = deque()           # lost with an engine, not yet in the next
        self._trials = Trials()
        self._vitals = Vitals(hang_s)
        self._backoff = Backoff()
        self._failed: str | None = None             # why the present process cannot load the model
        self._next_try_s: float | None = None

    @property
    def ready(self) -> bool:
        return self._up and self._vitals.is_fresh

    @property
    def state(self) -> str:
        """A line for whoever asks whether it is ready."""
        if self.ready:
            return "ready"
        if self._up:
            return "engine not alive: no sign of life, or a step that does not end"
        if self._next_try_s is not None:
            return f"engine ended {self._backoff.num_failures} times: next try in {self.retry_after_s} s"
        return "loading" if self.facts is None else "engine ended: loading the next"

    @property
    def retry_after_s(self) -> int:
        return max(1, math.ceil((self._next_try_s or 0.0) - time.monotonic()))

    @property
    def busy(self) -> bool:
        return bool(self.flights or len(self.admission))

    def total(self, name: str) -> float:
        """A counter over all the processes there have been."""
        return self._before.get(name, 0.0) + self.stats.get(name, 0.0)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def loaded(self) -> Ready:
        """Wait until the model is there; what it is."""
        await self._loaded.wait()
        if self.facts is None:
            raise InvalidModel(self.failure or f"{self.name} was not loaded")
        return self.facts

    # processes

    async def run(self) -> None:
        watch = asyncio.ensure_future(self._watch())
        try:
            while not self._closing.is_set() and self.failure is None:
                await self._pause()
                if not self._closing.is_set():
                    await self._run_once()
        finally:
            watch.cancel()
            self._up = False
            self._loaded.set()
            self._fail_all(EngineFailed(self.failure or "the engine has been stopped"))

    async def _run_once(self) -> None:
        """One process from its start to its end, whatever that is."""
        self._failed = None
        self._vitals.begin()
        end = "it could not be started"
        try:
            self._process = await EngineProcess.start(self.model, self.options, self._folder, self._command)
            try:
                if not self._closing.is_set():          # meanwhile
                    await self._process.watch(self._take)
            finally:
                self._process.kill()
                self._process.close()
            end = f"status {self._process.status}"
        except OSError as error:
            end += f": {error}"
        except Exception as error:
            log.exception("engine %s cannot be kept", self.name)
            end = f"{type(error).__name__}: {error}"
        if not self._closing.is_set():
            self._died(end)

    async def _pause(self) -> None:
        """Wait for the time of the next try, or until this engine is closed."""
        if self._next_try_s is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), max(0.0, self._next_try_s - time.monotonic()))
            self._next_try_s = None

    async def _watch(self) -> None:
        """Kill a process that gives no sign of life, or whose step does not end; begin and end trials in time."""
        while True:
            await asyncio.sleep(WATCH_S)
            vitals, process = self._vitals, self._process
            hangs = vitals.look()
            if process is not None and process.status is None and hangs and self._next_try_s is None:
                log.error("engine %s (process %d) hangs: no sign of life for %.1f s, step of %.1f s; restarting it",
                          self.name, process.pid, vitals.silent_s, vitals.step_s)
                process.kill()
            elif self._up:
                self._go_on()

    def _go_on(self) -> None:
        """What time alone brings about."""
        if self._vitals.is_healthy:
            self._backoff.reset()
        if self._vitals.is_stepping:
            self._trials.expire(time.monotonic())
        try:
            self._dispatch()
        except Exception:
            log.exception("engine %s: a request cannot be begun", self.name)

    # reports

    def _take(self, report: Report) -> None:
        if isinstance(report, Deltas):
            self._backoff.reset()
            for delta in report.deltas:
                self._take_delta(delta)
            self._dispatch()
        elif isinstance(report, Beat):
            self._vitals.take(report)
            self.stats = report.stats or self.stats
        elif isinstance(report, Refused):
            self._refused(report)
        elif isinstance(report, Found):
            self._on_found(report)
        elif isinstance(report, Failed):
            self._failed = report.error
        elif isinstance(report, Ready):
            self.facts, self._up = report, True
            self._vitals.ready()
            self._trials.open(time.monotonic())
            self._loaded.set()
            self._dispatch()

    def _take_delta(self, delta: Delta) -> None:
        part = self._parts.get(delta.request_id)
        if part is None or delta.sibling not in part.siblings:
            return
        flight = part.flight
        part.num_tokens += len(delta.tokens)
        self.admission.charge(flight.tenant, num_output=len(delta.tokens))
        if not self._tell(part, delta):
            self._drop(flight)                      # one failure ends the request; its siblings still run
            self._end(flight)
            return
        if delta.sibling not in flight.outputs:
            self._parts.end_sibling(part, delta.sibling)
        self._trials.note(part)
        if not part.siblings:
            self._parts.remove(part)
            self._trials.drop(part)
        if not flight.open:
            self._end(flight)

    def _tell(self, part: Part, delta: Delta) -> bool:
        """Hand a delta to those who listen; False where that is an end by an error."""
        try:
            if part.flight.take(delta):
                self._send(Abort(part.id, delta.sibling, "stop"))
        except Exception as error:
            log.exception("engine %s: the text of an answer cannot be made", self.name)
            part.flight.fail(EngineFailed(f"the text of the answer could not be made ({type(error).__name__}): see the "
                                          "server's log"))
            return False
        return delta.error is None

    def _refused(self, report: Refused) -> None:
        part = self._parts.get(report.id)
        if part is not None:
            self._parts.remove(part)
            self._drop(part.flight)
            part.flight.fail(InvalidRequest(report.error))
            self._end(part.flight)
            self._dispatch()

    # requests

    def submit(self, *flights: Flight) -> None:
        """Queue the prompts of one client request, all or none; Busy where there is no room."""
        if self.failure is not None:
            raise EngineFailed(self.failure)
        self.admission.enter(*flights)
        self._dispatch()

    def abort(self, *flights: Flight) -> None:
        """Nobody listens any more; within one step their blocks are free."""
        for flight in flights:
            flight.outputs.clear()
            self._drop(flight)
            self.flights.pop(flight.request.id, None)
        self._dispatch()

    def forget_prefixes(self) -> None:
        self._send(Forget())

    def _send(self, command: Add | Abort | Forget) -> None:
        if self._process is not None and self._up:
            self._process.send(command)

    def _dispatch(self) -> None:
        """Hand the engine what it can take: first those that lost an engine, then suspects, then those that wait."""
        if not self._up or self.facts is None:
            return
        while self._held:
            self._begin(self._held.popleft())
        if len(self._trials):
            for part in self._trials.next_group(time.monotonic()):
                self._begin(part)
        max_rows = self.facts.max_num_seqs
        while len(self.admission) and (self._parts.num_rows < max_rows + AHEAD or self._recall(max_rows)):
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
            request = replace(request, priority=0)      # among tenants it decides nothing
        self._parts.add(part)
        self._send(Add(request, outputs))

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
        shares = self.admission.shares([flight.tenant, *self._parts.tenants])
        parts = self._parts.find_recalls(flight, shares, max_rows, self._trials.__contains__)
        for part in parts:
            self._parts.remove(part)
            self._send(Abort(part.id))
            part.note_recall()
            part.flight.parts.appendleft(part)
            self.admission.put_back(part.flight)
        return bool(parts)

    def _drop(self, flight: Flight) -> None:
        """Take out whatever of a flight waits or runs."""
        self.admission.leave(flight)
        flight.parts.clear()
        if flight.request.id not in self.flights:
            return
        for part in [part for part in self._parts if part.flight is flight]:
            self._parts.remove(part)
            self._trials.drop(part)
            self._send(Abort(part.id))
        for part in [part for part in (*self._held, *self._trials) if part.flight is flight]:
            self._trials.drop(part)
            if part in self._held:
                self._held.remove(part)

    def _end(self, flight: Flight) -> None:
        if self.flights.pop(flight.request.id, None) is not None:
            self.admission.pace.count()

    # ends

    def _died(self, end: str) -> None:
        was_ready, self._up = self._up, False
        if self._failed is not None and self.facts is None:
            self.failure = self._failed
            return
        self.num_restarts += was_ready
        self._before = {name: self.total(name) for name in self._before | self.stats}
        self.stats = {}
        delay_s = self._backoff.fail()
        if self.facts is None and self._backoff.num_failures >= MAX_FIRST_STARTS:
            self.failure = (f"the engine process of {self.name} ended {MAX_FIRST_STARTS} times before it was ready "
                            f"({end}): see what it wrote to standard error; too little memory is the usual cause")
            return
        lost, condemned = self._trials.lose(self._parts.clear(), was_ready)
        self._held.extend(lost)
        for part in condemned:
            self._drop(part.flight)
            part.flight.fail(EngineFailed("this request ended the engine process each time it was tried; it is not "
                                          "tried again"))
            self._end(part.flight)
        self._next_try_s = time.monotonic() + delay_s if delay_s else None
        log.error("engine %s ended (%s)%s; starting a new one%s, %d requests go on", self.name, end,
                  f": {self._failed}" if self._failed else "", f" in {delay_s:g} s" if delay_s else "",
                  len(self.flights))

    def _fail_all(self, error: PenstockError) -> None:
        self._parts.clear()
        self._held.clear()
        waiting: Iterable[Flight] = {*self.flights.values(), *self.admission}
        self.flights.clear()
        for flight in waiting:
            self.admission.leave(flight)
            flight.parts.clear()
            flight.fail(error)

    async def close(self) -> None:
        """End the process; requests in flight get an error."""
        self._closing.set()
        if self._process is not None:
            with contextlib.suppress(Exception):
                await self._process.stop()
