"""The engine's end of the wire: commands in, deltas out, and a heartbeat beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import zmq

from penstock.engine.engine import Engine
from penstock.engine.messages import Abort, Add, Beat, Command, Deltas, Forget, Refused, Report, Stop
from penstock.errors import PenstockError

BEAT_S = 1.0


class Wire:
    """One of the two ends. The API process binds, an engine connects."""

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)

    def send(self, report: Report) -> None:
        self._socket.send(self._encoder.encode(report))

    def receive(self, wait: bool) -> Iterator[Command]:
        """What has come; the first of it is awaited if asked for."""
        while wait or self._socket.poll(0):
            yield self._decoder.decode(self._socket.recv())
            wait = False

    def close(self) -> None:
        self._socket.close()


class Pulse(threading.Thread):
    """Tells the API process, by a wire of its own, that this process lives and how old its step is."""

    def __init__(self, endpoint: str, stats: Callable[[], dict[str, float]]) -> None:
        super().__init__(name="penstock-pulse", daemon=True)
        self._endpoint = endpoint
        self._stats = stats
        self._begun: float | None = None

    def begin(self) -> None:
        self._begun = time.monotonic()

    def end(self) -> None:
        self._begun = None

    def run(self) -> None:
        wire = Wire(self._endpoint)
        while True:
            begun = self._begun
            wire.send(Beat(time.monotonic() - begun if begun is not None else 0.0, self._stats()))
            time.sleep(BEAT_S)


def serve(engine: Engine, wire: Wire, pulse: Pulse) -> None:
    """Steps while there is work, sleep while there is none, until told to stop."""
    while True:
        for command in wire.receive(wait=not engine.has_work):
            if isinstance(command, Stop):
                return
            _obey(engine, command, wire)
        if engine.has_work:
            pulse.begin()
            begin = time.perf_counter()
            deltas = engine.step()
            engine.scheduler.stats.step_s += time.perf_counter() - begin
            pulse.end()
            if deltas:
                wire.send(Deltas(deltas))


def _obey(engine: Engine, command: Command, wire: Wire) -> None:
    if isinstance(command, Add):
        try:
            engine.add(command.request, command.outputs)
        except PenstockError as error:
            wire.send(Refused(command.request.id, str(error)))
    elif isinstance(command, Abort):
        engine.abort(command.id, command.sibling, command.reason)
    elif isinstance(command, Forget):
        engine.scheduler.cache.tree.clear()
