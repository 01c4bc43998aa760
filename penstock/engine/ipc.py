"""The engine's end of the wire: commands in, deltas out, and a heartbeat beside them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import zmq

from penstock.engine.accounting import StepAccount
from penstock.engine.engine import Engine
from penstock.engine.executor import Answer, Awaited, Done, make_message
from penstock.engine.fetching import Fetch, Fetches
from penstock.engine.messages import (
    Abort,
    Add,
    Answered,
    Beat,
    Command,
    Control,
    Deltas,
    Forget,
    Look,
    Refused,
    Report,
    Seen,
    Stop,
)
from penstock.engine.ranks import LastBeat
from penstock.engine.view import Viewer
from penstock.errors import PenstockError
from penstock.types import Request

BEAT_S = 1.0
LAST_S = 2.0  # for a process's last report
MAX_PREPARING = 2  # at once
PREPARING_S = 0.005  # between checks of what is being prepared or read, while nothing runs


class Wire:
    """One of the two ends. The API process binds, an engine connects."""

    def __init__(self, endpoint: str, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self._socket = (context or zmq.Context.instance()).socket(zmq.PAIR)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)

    def send(self, report: Report) -> None:
        self._socket.send(self._encoder.encode(report))

    def receive(self, wait_s: float | None) -> Iterator[Command]:
        """Yield the commands that have come; waits `wait_s` for the first, for ever if None."""
        wait_ms = None if wait_s is None else int(wait_s * 1e3)
        while self._socket.poll(wait_ms):
            yield self._decoder.decode(self._socket.recv())
            wait_ms = 0

    def close(self) -> None:
        self._socket.close()


class Heartbeat(threading.Thread):
    """Tells the API process, over a wire of its own, that this process lives and how old its step is."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(name="penstock-heartbeat", daemon=True)
        self._endpoint = endpoint
        self._stats: Callable[[], dict[str, float]] = dict
        self._told, self._ended = threading.Event(), threading.Event()
        self._last: Report | None = None
        self.list_ranks: Callable[[], list[LastBeat]] = list
        self.begun: float | None = None  # the step under way, by the monotonic clock

    def tell(self, stats: Callable[[], dict[str, float]]) -> None:
        """Send these figures from now on, and for the first time at once."""
        self._stats = stats
        self._told.set()

    def end(self, last: Report) -> None:
        """Send a last report, and wait until it is on its way: this process is about to end."""
        self._last = self._last or last
        self._told.set()
        self._ended.wait(LAST_S)

    def run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # its end waits for what was sent
        wire = Wire(self._endpoint, context)
        while self._last is None:
            begun = self.begun
            step_s = time.monotonic() - begun if begun is not None else 0.0
            wire.send(Beat(step_s, self._stats(), self.list_ranks()))
            self._told.wait(BEAT_S)
            self._told.clear()
        wire.send(self._last)
        wire.close()
        context.term()
        self._ended.set()


class CommandLoop:
    """Obeys commands and makes steps. `prepare` does slow work for a request before its first step, in another thread;
    what it returns is held until the request ends."""

    def __init__(self, engine: Engine, wire: Wire, heartbeat: Heartbeat, prepare: Callable[[Request], object]) -> None:
        self._engine, self._wire, self._heartbeat, self._prepare = engine, wire, heartbeat, prepare
        self._preparing: dict[str, Add] = {}
        self._preparers = ThreadPoolExecutor(MAX_PREPARING, "penstock-prepare")
        self._prepared: queue.SimpleQueue[tuple[str, object, float]] = queue.SimpleQueue()
        self._held: dict[str, object] = {}
        self._fetches: Fetches | None = None
        self._told: list[tuple[str, Awaited[Answer]]] = []  # control messages that have no answer yet
        self._journal, self._viewer = engine.scheduler.roster.journal, Viewer(engine)
        self._journal.is_open = True
        self.account = StepAccount()
        engine.watch = self.account.watch

    def fetch_with(self, fetch: Fetch) -> None:
        """Fetch the blocks of prompts that other servers computed."""
        self._fetches = Fetches(fetch)

    def stats(self) -> dict[str, float]:
        """Return the figures for heartbeats."""
        if self.account.energy is not None and not self._engine.has_work:
            self.account.energy.rest()
        return {**self._engine.stats(), **self.account.stats()}

    def serve(self) -> None:
        """Make steps while there is work and wait while there is none, until told to stop."""
        engine, is_prepared = self._engine, False
        while True:
            is_idle = is_prepared and not (self._preparing or self._told or self._fetches)
            if engine.has_work:
                wait_s: float | None = PREPARING_S if engine.awaits_loras else 0.0
            else:
                wait_s = 0.0 if engine.has_saves else None if is_idle else PREPARING_S
            for command in self._wire.receive(wait_s):
                if isinstance(command, Stop):
                    return self._close()
                self._obey(command)
            self._enter_fetched()
            self._enter_prepared()
            self._send_answers()
            if engine.has_work:
                self._step()
            elif engine.has_saves:
                engine.save()
            elif not is_prepared:
                is_prepared = not engine.prepare()

    def _step(self) -> None:
        self._heartbeat.begun = time.monotonic()
        begin = time.perf_counter()
        deltas = self._engine.step(waits_for_loras=False)
        self._engine.scheduler.stats.step_s += time.perf_counter() - begin
        self._heartbeat.begun = None
        energy = self.account.energy.settle(deltas, self._engine.has_work) if self.account.energy is not None else {}
        if energy:
            self._wire.send(Deltas(energy_j=energy))
        few, marks = [delta for delta in deltas if delta.prompt_logprobs is None], self._journal.take()
        if marks and len(few) < len(deltas):
            self._wire.send(Deltas(marks=marks))
            marks = []
        for delta in deltas if len(few) < len(deltas) else ():
            if delta.prompt_logprobs is not None:
                self._wire.send(Deltas([delta]))  # large: a message of its own
        if few or marks:
            self._wire.send(Deltas(few, marks))
        for delta in deltas if self._held else ():
            if delta.request_id not in self._engine.scheduler.roster.requests:
                self._held.pop(delta.request_id, None)

    def _obey(self, command: Command) -> None:
        if isinstance(command, Add):
            if command.request.blocks_from and self._fetches is not None:
                self._fetches.begin(command, self._engine.scheduler.count_known(command.request))
            else:
                self._enter(command)
        elif isinstance(command, Abort):
            if command.sibling is None:
                self._preparing.pop(command.id, None)
                if self._fetches is not None:
                    self._fetches.drop(command.id)
                self._held.pop(command.id, None)
            self._engine.abort(command.id, command.sibling, command.reason)
        elif isinstance(command, Forget):
            self._engine.forget_prefixes()
        elif isinstance(command, Look):
            self._look(command)
        elif isinstance(command, Control):
            self._told.append((command.id, self._tell(command)))
            self._send_answers()

    def _enter(self, command: Add) -> None:
        """Add a request, prepared first if it needs that."""
        if not command.request.is_guided:
            self._add(command)
        else:
            self._preparing[command.request.id] = command
            self._preparers.submit(self._prepare_aside, command.request)

    def _enter_fetched(self) -> None:
        for command, count, seconds in self._fetches.take() if self._fetches else ():
            self._journal.fetch(command.request.id, count, seconds)
            self._enter(command)

    def _close(self) -> None:
        self._preparers.shutdown(wait=False, cancel_futures=True)
        if self._fetches is not None:
            self._fetches.close()

    def _look(self, command: Look) -> None:
        if command.last:
            return self._viewer.stop()
        stats, num_waiting = self.stats(), len(self._engine.scheduler.roster.waiting)
        self._wire.send(Seen(stats, self._viewer.list_rows(), num_waiting, self._viewer.describe_blocks()))

    def _tell(self, command: Control) -> Awaited[Answer]:
        try:
            return self._engine.tell(make_message(command.name, command.values))
        except PenstockError as error:
            return Done(Answer(error=str(error)))

    def _send_answers(self) -> None:
        """Answer the control messages that have been obeyed."""
        if not self._told:
            return
        if deltas := self._engine.poll():
            self._wire.send(Deltas(deltas))
        done = [(id, ticket) for id, ticket in self._told if ticket.is_done]
        self._told = [one for one in self._told if one not in done]
        for id, ticket in done:
            self._wire.send(Answered(id, ticket.result()))

    def _prepare_aside(self, request: Request) -> None:
        if request.id not in self._preparing:
            return  # aborted while it waited
        begin_s = time.perf_counter()
        try:
            outcome = self._prepare(request)
        except PenstockError as error:
            outcome = error
        except Exception as error:
            outcome = PenstockError(f"the request could not be prepared ({type(error).__name__}: {error})")
        self._prepared.put((request.id, outcome, time.perf_counter() - begin_s))

    def _enter_prepared(self) -> None:
        while self._preparing and not self._prepared.empty():
            id, outcome, seconds = self._prepared.get()
            command = self._preparing.pop(id, None)
            if command is None:
                continue
            if isinstance(outcome, PenstockError):
                self._wire.send(Refused(id, str(outcome)))
            else:
                self._held[id] = outcome
                self._journal.prepare(id, seconds)
                self._add(command)

    def _add(self, command: Add) -> None:
        try:
            self._engine.add(command.request, command.outputs, command.mus)
        except PenstockError as error:
            self._held.pop(command.request.id, None)
            self._wire.send(Refused(command.request.id, str(error)))
