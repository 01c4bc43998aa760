"""An engine process without a model: its loop and messages are the engine's own, its tokens cost nothing."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from bench.streams.trace import stamp
from penstock.api.model_files import find_model
from penstock.api.worker import Task, _describe_model
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.ipc import CommandLoop, Heartbeat, Wire
from penstock.engine.journal import RequestJournal
from penstock.engine.messages import Ready
from penstock.host.parent import read_first_line
from penstock.types import Delta, Request

STEP_S = float(os.environ.get("STREAMS_STEP_MS", "0")) / 1e3  # pace; 0: as fast as messages are made
NUM_ROWS = 1024
FIRST_TOKEN, NUM_TOKENS = 1000, 20000  # of a vocabulary, in turn
VOCAB_SIZE = 32000
MAX_MODEL_LEN = 8192


class CountingEngine:
    """Each step adds one token to every request."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}  # tokens to come, by request
        self._num_steps = 0
        self._due_s = 0.0
        roster = SimpleNamespace(requests=self._left, journal=RequestJournal())
        self.scheduler = SimpleNamespace(stats=SimpleNamespace(step_s=0.0), roster=roster)

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add(self, request: Request, outputs: object = None, mus: object = None) -> None:
        stamp("engine adds")
        self._left[request.id] = request.max_tokens

    def abort(self, id: str, sibling: int | None = None, reason: str = "") -> list[Delta]:
        self._left.pop(id, None)
        return []

    def step(self) -> list[Delta]:
        now = time.perf_counter()
        time.sleep(max(0.0, self._due_s - now))
        self._due_s = max(self._due_s, now) + STEP_S
        self._num_steps += 1
        deltas = []
        for at, (id, left) in enumerate(self._left.items()):
            token = FIRST_TOKEN + (self._num_steps * 31 + at * 7) % NUM_TOKENS
            deltas.append(Delta(id, 0, (token,), finish_reason="length" if left == 1 else None))
            self._left[id] = left - 1
        for delta in deltas:
            if delta.finish_reason is not None:
                del self._left[delta.request_id]
        stamp("engine steps")
        return deltas

    def prepare(self) -> bool:
        return False


def main() -> int:
    task = msgspec.json.decode(read_first_line(), type=Task)
    wire, heartbeat = Wire(task.endpoint), Heartbeat(task.beat_endpoint)
    heartbeat.start()
    config = EngineConfig.from_options(**task.options)
    wire.send(_describe_model(find_model(task.model, config.revision, progress=False), config))
    wire.send(Ready([("engine", "counting", "")], {}, VOCAB_SIZE, 8, MAX_MODEL_LEN, 1 << 24, NUM_ROWS, *NO_WEIGHTS))
    heartbeat.tell(lambda: {"num_running": 0.0})
    CommandLoop(cast(Engine, CountingEngine()), wire, heartbeat, _prepare).serve()
    wire.close()
    return 0


NO_WEIGHTS: Any = (0, 0, False, "none", "Counting", 0.0)  # bytes of weights and cache, is_encoder, names, load_s


def _prepare(request: Request) -> object:
    return None


if __name__ == "__main__":
    sys.exit(main())
