"""An engine that is replaced when it dies: requests in flight go on where they were, token for token."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.engine.ipc import BEAT_S
from penstock.engine.messages import Abort, Add, Beat, Deltas, Failed, Forget, Found, Ready, Refused, Report
from penstock.errors import EngineFailed, InvalidModel, InvalidRequest, PenstockError
from penstock.server.admission import Admission
from penstock.server.flight import Flight
from penstock.server.process import WORKER, EngineProcess
from penstock.types import Delta

log = logging.getLogger("penstock.engine")

WATCH_S = 0.25
MOST_STARTS = 3             # that end before the model is loaded
SUSPECT_DEATHS = 2          # a request that was there at so many deaths runs alone
MOST_DEATHS = 6
AHEAD = 8                   # requests that an engine has beyond those it can run, so that it never waits for one


class RemoteEngine:
    """`run` is the one task that starts processes and waits for their ends; everything else is called beside it."""

    def __init__(self, name: str, model: str, options: Mapping[str, Any], folder: Path, admission: Admission, *,
                 hang_s: float = 60.0, command: Sequence[str] = WORKER,
                 on_found: Callable[[Found], None] = lambda found: None) -> None:
        self.name, self.model, self.options = name, model, dict(options)
        self.admission = admission
        self.hang_s = hang_s
        self.facts: Ready | None = None
        self.failure: str | None = None             # why there will be no engine
        self.stats: dict[str, float] = {}
        self.num_restarts = 0
        self._before: dict[str, float] = {}         # counters of the processes that died
        self.flights: dict[str, Flight] = {}        # in the engine
        self._folder, self._command, self._on_found = folder, command, on_found
        self._process: EngineProcess | None = None
        self._loaded = asyncio.Event()              # ready or failed for good
        self._up = False
        self._closing = False
        self._held: list[Flight] = []               # lost with an engine, not yet in the next
        self._alone: Flight | None = None
        self._beat_s = 0.0
        self._step_s = 0.0
        self._early_deaths = 0                      # of processes, one after another, before they were ready

    @property
    def ready(self) -> bool:
        return self._up and time.monotonic() - self._beat_s < 2 * BEAT_S and self._step_s < self.hang_s

    @property
    def busy(self) -> bool:
        return bool(self.flights or self._held or len(self.admission))

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

    async def run(self) -> None:
        watch = asyncio.ensure_future(self._watch())
        try:
            while not self._closing and self.failure is None:
                self._beat_s, self._step_s = time.monotonic(), 0.0
                self._process = await EngineProcess.start(self.model, self.options, self._folder, self._command)
                try:
                    await self._process.watch(self._take)
                finally:
                    self._process.kill()
                    self._process.close()
                self._died(self._process.status)
        except Exception as error:
            log.exception("the engine of %s cannot be kept", self.name)
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            watch.cancel()
            self._up = False
            self._loaded.set()
            self._fail_all(EngineFailed(self.failure or "the engine has been stopped"))

    async def _watch(self) -> None:
        """Kill a process that gives no sign of life, or whose step does not end."""
        while True:
            await asyncio.sleep(WATCH_S)
            silent_s = time.monotonic() - self._beat_s
            if self._process and self._up and max(silent_s, self._step_s) > self.hang_s:
                log.error("engine %s (process %d) hangs: no sign of life for %.1f s, step of %.1f s; restarting it",
                          self.name, self._process.pid, silent_s, self._step_s)
                self._up = False
                self._process.kill()

    # reports

    def _take(self, report: Report) -> None:
        if isinstance(report, Deltas):
            for delta in report.deltas:
                self._take_delta(delta)
            self._dispatch()
        elif isinstance(report, Beat):
            self._beat_s, self._step_s, self.stats = time.monotonic(), report.step_s, report.stats
        elif isinstance(report, Refused):
            self._end(report.id, InvalidRequest(report.error))
        elif isinstance(report, Found):
            self._on_found(report)
        elif isinstance(report, Failed):
            self.failure = report.error
        elif isinstance(report, Ready):
            self.facts, self._up, self._beat_s = report, True, time.monotonic()
            self._loaded.set()
            self._dispatch()

    def _take_delta(self, delta: Delta) -> None:
        flight = self.flights.get(delta.request_id)
        if flight is None:
            return
        if flight is self._alone and (delta.tokens or delta.finish_reason):
            self._alone, flight.num_deaths = None, SUSPECT_DEATHS - 1
        self.admission.charge(flight.tenant, num_output=len(delta.tokens))
        if flight.take(delta):
            self._send(Abort(delta.request_id, delta.sibling, "stop"))
        if delta.error is not None and flight.request.num_siblings > 1:
            self._send(Abort(delta.request_id))         # one failure ends the request; its siblings still run
        if not flight.open:
            self._end(delta.request_id)

    # requests

    def submit(self, flight: Flight) -> None:
        """Queue a request, or refuse it with Busy."""
        if self.failure is not None:
            raise EngineFailed(self.failure)
        self.admission.enter(flight)
        self._dispatch()

    def abort(self, flight: Flight) -> None:
        """Nobody listens any more; within one step its blocks are free."""
        flight.outputs.clear()
        if self.admission.leave(flight):
            return
        if flight in self._held:
            self._held.remove(flight)
        elif self.flights.pop(flight.request.id, None) is not None:
            self._send(Abort(flight.request.id))
            if flight is self._alone:
                self._alone = None
        self._dispatch()

    def forget_prefixes(self) -> None:
        self._send(Forget())

    def _send(self, command: Add | Abort | Forget) -> None:
        if self._process is not None and self._up:
            self._process.send(command)

    def _dispatch(self) -> None:
        """Hand the engine what it can take: first those that lost an engine, suspects among them one by one."""
        if not self._up or self.facts is None or self._alone is not None:
            return
        suspects = [flight for flight in self._held if flight.num_deaths >= SUSPECT_DEATHS]
        if suspects:
            if not self.flights:
                self._alone = suspects[0]
                self._held.remove(suspects[0])
                self._begin(suspects[0])
            return
        while self._held:
            self._begin(self._held.pop(0))
        room = self.facts.max_num_seqs + AHEAD - sum(f.request.num_siblings for f in self.flights.values())
        while room > 0 and (flight := self.admission.next()) is not None:
            self._begin(flight)
            room -= flight.request.num_siblings

    def _begin(self, flight: Flight) -> None:
        self.flights[flight.request.id] = flight
        self._send(Add(flight.request, flight.outputs if flight.num_deaths else None))

    def _end(self, id: str, error: PenstockError | None = None) -> None:
        flight = self.flights.pop(id, None)
        if flight is None:
            return
        if flight is self._alone:
            self._alone = None
        if error is not None:
            flight.fail(error)
        self.admission.pace.count()
        self._dispatch()

    # ends

    def _died(self, status: int | None) -> None:
        was_up, self._up = self._up, False
        if self._closing or self.failure is not None:
            return
        self.num_restarts += was_up
        self._before = {name: self.total(name) for name in self.stats}
        self.stats = {}
        self._early_deaths = 0 if was_up else self._early_deaths + 1
        if self._early_deaths >= MOST_STARTS:
            self.failure = (f"the engine process of {self.name} ended {MOST_STARTS} times before it was ready (status "
                            f"{status}): see what it wrote to standard error; too little memory is the usual cause")
            return
        log.error("engine %s ended (status %s); starting a new one, %d requests go on", self.name, status,
                  len(self.flights) + len(self._held))
        lost, self.flights = list(self.flights.values()), {}
        alone, self._alone = self._alone, None
        for flight in lost:
            flight.num_deaths += 1
            if flight is alone or flight.num_deaths >= MOST_DEATHS:
                flight.fail(EngineFailed("this request ended the engine process each time it was tried; it is not "
                                         "tried again"))
            else:
                self._held.append(flight)

    def _fail_all(self, error: PenstockError) -> None:
        waiting = [*self.flights.values(), *self._held, *self.admission]
        self.flights.clear()
        self._held.clear()
        while self.admission.next() is not None:
            pass
        for flight in waiting:
            flight.fail(error)

    async def close(self) -> None:
        """End the process; requests in flight get an error."""
        self._closing = True
        if self._process is not None:
            with contextlib.suppress(Exception):
                await self._process.stop()
