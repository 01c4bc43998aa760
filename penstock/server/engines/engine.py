"""An engine, watched and restarted when it dies or hangs; requests in flight continue token for token."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable

from penstock.engine.messages import (
    Abort,
    Add,
    Answered,
    Beat,
    Control,
    Deltas,
    Failed,
    Forget,
    Found,
    Look,
    LostRank,
    Ready,
    Refused,
    Report,
    Seen,
)
from penstock.errors import EngineFailed, InvalidModel
from penstock.server.engines.controls import Controls
from penstock.server.engines.dispatcher import Dispatcher, add_energy
from penstock.server.engines.process import EngineProcess, Launch
from penstock.server.engines.watchdog import WATCH_S, Backoff, Watchdog
from penstock.server.observe.ranks import RankWatch

log = logging.getLogger("penstock.engine")
MAX_LOOK_S = 5.0  # until an unanswered look is repeated
MAX_FIRST_STARTS = 8  # of an engine that was never ready; later ones are retried forever


class EngineView:
    """The engine as it was last looked at."""

    def __init__(self, send: Callable[[Look], None]) -> None:
        self.seen: Seen | None = None
        self.seen_s = 0.0  # by time.monotonic()
        self._send = send
        self._asked_s: float | None = None
        self._news = asyncio.Event()

    async def look(self, patience_s: float) -> None:
        """Ask the engine, which answers between two steps, and wait for its answer for a while."""
        if self._asked_s is None or time.monotonic() - self._asked_s > MAX_LOOK_S:
            self._asked_s = time.monotonic()
            self._news.clear()
            self._send(Look())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), patience_s)

    def take(self, seen: Seen) -> None:
        if self._asked_s is None:
            return  # the viewer is gone
        self.seen, self.seen_s, self._asked_s = seen, time.monotonic(), None
        self._news.set()

    def close(self) -> None:
        """Forget it: the viewers or the process are gone."""
        if self.seen is not None or self._asked_s is not None:
            self.seen = self._asked_s = None
            self._send(Look(last=True))


class RemoteEngine:
    """An engine process and its successors. Only the task `run` starts processes and awaits their ends."""

    def __init__(
        self,
        name: str,
        launch: Launch,
        dispatcher: Dispatcher,
        *,
        hang_s: float = 60.0,
        on_found: Callable[[Found], None] = lambda found: None,
    ) -> None:
        self.name, self.launch = name, launch
        self.facts: Ready | None = None
        self.failure: str | None = None  # set when the engine is given up
        self.stats: dict[str, float] = {}
        self.num_restarts = 0
        self._past_stats: dict[str, float] = {}  # counters of earlier processes
        self._on_found = on_found
        self._process: EngineProcess | None = None
        self._settled = asyncio.Event()  # ready or given up
        self._is_up = False
        self.view = EngineView(self._send)
        self._closing = asyncio.Event()
        self.dispatcher = dispatcher
        self._number = len(dispatcher.replicas)
        self.replica = dispatcher.replicas.add(self._send, launch.find_role(self._number))
        self.controls = Controls(self._send)
        self.ranks = RankWatch()
        self.list_first: Callable[[], Iterable[object]] = tuple  # messages that come before the requests
        self._watchdog = Watchdog(hang_s)
        self._backoff = Backoff()
        self._failed: str | None = None  # why this process cannot load the model
        self._next_try_s: float | None = None

    @property
    def is_ready(self) -> bool:
        return self._is_up and self._watchdog.is_alive

    @property
    def state(self) -> str:
        """A line of text for health checks."""
        if self.is_ready:
            return "ready"
        if self._is_up:
            return "engine not responding: no heartbeat, or a step that does not end"
        if self._next_try_s is not None:
            return f"engine crashed {self._backoff.num_failures} times: next start in {self.retry_after_s} s"
        return "loading" if self.facts is None else "engine crashed: restarting"

    @property
    def retry_after_s(self) -> int:
        return max(1, math.ceil((self._next_try_s or 0.0) - time.monotonic()))

    def total(self, name: str) -> float:
        """Sum a counter over all processes so far."""
        return self._past_stats.get(name, 0.0) + self.stats.get(name, 0.0)

    def list_totals(self) -> set[str]:
        """List the counters by name."""
        return self._past_stats.keys() | self.stats.keys()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def wait_ready(self) -> Ready:
        """Wait until the model is loaded; return its facts."""
        await self._settled.wait()
        if self.facts is None:
            raise InvalidModel(self.failure or f"{self.name} was not loaded")
        return self.facts

    async def run(self) -> None:
        watch = asyncio.ensure_future(self._watch())
        try:
            while not self._closing.is_set() and self.failure is None:
                await self._pause()
                if not self._closing.is_set():
                    await self._run_once()
        finally:
            watch.cancel()
            self._is_up = False
            self._settled.set()
            failure = EngineFailed(self.failure or "the engine was stopped")
            self.controls.fail_all(failure)
            self.dispatcher.fail_all(failure)

    async def _run_once(self) -> None:
        self._failed = None
        self._watchdog.start()
        end = "it did not start"
        try:
            self._process = await EngineProcess.start(self.launch, self._number)
            try:
                if not self._closing.is_set():  # it may have been set meanwhile
                    await self._process.watch(self._handle, self.dispatcher.unwritten.flush)
            finally:
                self._process.kill()
                self._process.close()
            end = f"status {self._process.status}"
        except OSError as error:
            end += f": {error}"
        except Exception as error:
            log.exception("engine %s failed", self.name)
            end = f"{type(error).__name__}: {error}"
        if not self._closing.is_set():
            self._handle_death(end)

    async def _pause(self) -> None:
        """Wait until the next start is due, or the engine is closed."""
        if self._next_try_s is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), max(0.0, self._next_try_s - time.monotonic()))
            self._next_try_s = None

    async def _watch(self) -> None:
        """Kill a process without heartbeats or with an endless step; run what is due by time."""
        while True:
            await asyncio.sleep(WATCH_S)
            watchdog, process = self._watchdog, self._process
            hangs = watchdog.check()
            if process is not None and process.status is None and hangs and self._next_try_s is None:
                log.error(
                    "engine %s (process %d) hangs: no heartbeat for %.1f s, step of %.1f s; restarting it",
                    self.name,
                    process.pid,
                    watchdog.silent_s,
                    watchdog.step_s,
                )
                process.kill()
            elif self._is_up:
                self._tick()

    def _tick(self) -> None:
        """Reset the backoff, end expired trials and dispatch what waits."""
        if self._watchdog.is_healthy:
            self._backoff.reset()
        if self._watchdog.is_stepping:
            self.replica.quarantine.expire(time.monotonic())
        try:
            self.dispatcher.dispatch()
        except Exception:
            log.exception("engine %s: cannot start a request", self.name)

    def _handle(self, report: Report) -> None:
        if isinstance(report, Deltas):
            if report.energy_j:
                add_energy(self.dispatcher, report.energy_j)
            if report.marks:
                self.dispatcher.handle_marks(report.marks)
            if report.deltas:
                self._backoff.reset()
                self.dispatcher.handle_deltas(report.deltas)
        elif isinstance(report, Beat):
            self._watchdog.record(report)
            self.stats = report.stats or self.stats
            self.ranks.take(report.ranks)
        elif isinstance(report, Seen):
            self.view.take(report)
            self.stats = report.stats
        elif isinstance(report, Refused):
            self.dispatcher.refuse(report.id, report.error)
        elif isinstance(report, Answered):
            self.controls.take(report)
        elif isinstance(report, Found):
            self._on_found(report)
        elif isinstance(report, LostRank):
            self.ranks.lose(report)
        elif isinstance(report, Failed):
            self._failed = report.error
        elif isinstance(report, Ready):
            self.facts, self._is_up = report, True
            self._watchdog.mark_ready()
            self._settled.set()
            self.controls.open(self.list_first())
            self.replica.num_slots = next((value for name, value, _ in report.settings if name == "max_loras"), 0)
            self.ranks.open(report.ranks)
            self.replica.ranks, self.replica.transfer_port = report.ranks, report.transfer_port
            self.dispatcher.open(self.replica, report.max_num_seqs, report.kv_cache_tokens)

    def forget_prefixes(self) -> None:
        self._send(Forget())
        self.replica.prefixes.clear()

    def _send(self, command: Add | Abort | Control | Forget | Look) -> None:
        if self._process is not None and self._is_up:
            self._process.send(command)

    def _handle_death(self, end: str) -> None:
        was_ready, self._is_up = self._is_up, False
        self.controls.handle_death()
        if self._failed is not None and self.facts is None:
            self.failure = self._failed
            return
        self.num_restarts += was_ready
        self._past_stats = {name: self.total(name) for name in self._past_stats | self.stats}
        self.stats = {}
        self.view.close()
        delay_s = self._backoff.fail()
        if self.facts is None and self._backoff.num_failures >= MAX_FIRST_STARTS:
            self.failure = (
                f"the engine process of {self.name} ended {MAX_FIRST_STARTS} times before it was ready "
                f"({end}): see its standard error; the usual cause is too little memory"
            )
            return
        self.dispatcher.handle_death(self.replica, was_ready, self.ranks.close())
        self._next_try_s = time.monotonic() + delay_s if delay_s else None
        log.error(
            "engine %s crashed (%s)%s; restarting%s, %d requests continue",
            self.name,
            end,
            f": {self._failed}" if self._failed else "",
            f" in {delay_s:g} s" if delay_s else "",
            len(self.dispatcher.flights),
        )

    async def close(self) -> None:
        """Stop the process; requests in flight fail."""
        self._closing.set()
        if self._process is not None:
            if not self._is_up:
                self._process.kill()  # it loads a model, and reads no messages
            with contextlib.suppress(Exception):
                await self._process.stop()
