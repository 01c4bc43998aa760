"""An engine that is replaced when it dies: requests in flight go on where they were, token for token."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.engine.messages import Abort, Add, Beat, Deltas, Failed, Forget, Found, Ready, Refused, Report
from penstock.errors import EngineFailed, InvalidModel
from penstock.server.admission import Admission
from penstock.server.flight import Flight
from penstock.server.process import WORKER, EngineProcess
from penstock.server.traffic import Traffic
from penstock.server.vitals import WATCH_S, Backoff, Vitals

log = logging.getLogger("penstock.engine")

MAX_FIRST_STARTS = 8  # of an engine that has never been ready; later ones are tried for ever


class RemoteEngine:
    """`run` is the one task that starts processes and waits for their ends; everything else is called beside it."""

    def __init__(
        self,
        name: str,
        model: str,
        options: Mapping[str, Any],
        folder: Path,
        admission: Admission,
        *,
        hang_s: float = 60.0,
        command: Sequence[str] = WORKER,
        on_found: Callable[[Found], None] = lambda found: None,
    ) -> None:
        self.name, self.model, self.options = name, model, dict(options)
        self.admission = admission
        self.facts: Ready | None = None
        self.failure: str | None = None  # why there will be no engine
        self.stats: dict[str, float] = {}
        self.num_restarts = 0
        self._before: dict[str, float] = {}  # counters of the processes that died
        self._folder, self._command, self._on_found = folder, command, on_found
        self._process: EngineProcess | None = None
        self._loaded = asyncio.Event()  # ready or failed for good
        self._up = False
        self._closing = asyncio.Event()
        self.traffic = Traffic(admission, self._send)
        self._vitals = Vitals(hang_s)
        self._backoff = Backoff()
        self._failed: str | None = None  # why the present process cannot load the model
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
    def flights(self) -> dict[str, Flight]:
        """Those that have begun, by the ids of their requests."""
        return self.traffic.flights

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
            self.traffic.fail_all(EngineFailed(self.failure or "the engine has been stopped"))

    async def _run_once(self) -> None:
        """One process from its start to its end, whatever that is."""
        self._failed = None
        self._vitals.begin()
        end = "it could not be started"
        try:
            self._process = await EngineProcess.start(self.model, self.options, self._folder, self._command)
            try:
                if not self._closing.is_set():  # meanwhile
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
                log.error(
                    "engine %s (process %d) hangs: no sign of life for %.1f s, step of %.1f s; restarting it",
                    self.name,
                    process.pid,
                    vitals.silent_s,
                    vitals.step_s,
                )
                process.kill()
            elif self._up:
                self._go_on()

    def _go_on(self) -> None:
        """Do what is due by time alone: clear the backoff, end trials, begin what waits."""
        if self._vitals.is_healthy:
            self._backoff.reset()
        if self._vitals.is_stepping:
            self.traffic.trials.expire(time.monotonic())
        try:
            self.traffic.dispatch()
        except Exception:
            log.exception("engine %s: a request cannot be begun", self.name)

    # reports

    def _take(self, report: Report) -> None:
        if isinstance(report, Deltas):
            self._backoff.reset()
            self.traffic.take(report.deltas)
        elif isinstance(report, Beat):
            self._vitals.take(report)
            self.stats = report.stats or self.stats
        elif isinstance(report, Refused):
            self.traffic.refuse(report.id, report.error)
        elif isinstance(report, Found):
            self._on_found(report)
        elif isinstance(report, Failed):
            self._failed = report.error
        elif isinstance(report, Ready):
            self.facts, self._up = report, True
            self._vitals.ready()
            self._loaded.set()
            self.traffic.open(report.max_num_seqs, report.kv_cache_tokens)

    # requests

    def submit(self, *flights: Flight) -> None:
        """Queue the prompts of one client request, all or none; Busy where there is no room."""
        if self.failure is not None:
            raise EngineFailed(self.failure)
        self.traffic.submit(*flights)

    def abort(self, *flights: Flight) -> None:
        """Nobody listens any more; within one step their blocks are free."""
        self.traffic.abort(*flights)

    def forget_prefixes(self) -> None:
        self._send(Forget())

    def _send(self, command: Add | Abort | Forget) -> None:
        if self._process is not None and self._up:
            self._process.send(command)

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
            self.failure = (
                f"the engine process of {self.name} ended {MAX_FIRST_STARTS} times before it was ready "
                f"({end}): see what it wrote to standard error; too little memory is the usual cause"
            )
            return
        self.traffic.lose(was_ready)
        self._next_try_s = time.monotonic() + delay_s if delay_s else None
        log.error(
            "engine %s ended (%s)%s; starting a new one%s, %d requests go on",
            self.name,
            end,
            f": {self._failed}" if self._failed else "",
            f" in {delay_s:g} s" if delay_s else "",
            len(self.flights),
        )

    async def close(self) -> None:
        """End the process; requests in flight get an error."""
        self._closing.set()
        if self._process is not None:
            with contextlib.suppress(Exception):
                await self._process.stop()
