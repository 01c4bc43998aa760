"""An engine process without a model: scheduler, cache and messages are the engine's own, its device waits."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.api.model_files import find_model
from penstock.api.worker import Task, _describe_model
from penstock.cache.group import Group, StateSpec
from penstock.cache.kv import KVCache
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.executor import Answer, Awaited, Ticket
from penstock.engine.ipc import CommandLoop, Heartbeat, Wire
from penstock.engine.messages import Ready
from penstock.engine.plan import Output, Plan, Result, RowResult
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.host.parent import read_first_line
from penstock.types import Request

STEP_S = float(os.environ.get("WATCH_STEP_MS", "50")) / 1e3
NUM_ROWS = int(os.environ.get("WATCH_ROWS", "64"))
NUM_BLOCKS = int(os.environ.get("WATCH_BLOCKS", "40000"))
BLOCK_SIZE = 16
VOCAB_SIZE = 32000
MAX_MODEL_LEN = 1 << 17
NO_WEIGHTS: Any = (0, 0, False, "none", "Waiting", 0.0)  # bytes of weights and cache, is_encoder, names, load_s


@dataclass
class PacedTicket:
    end_s: float
    value: Result

    def result(self) -> Result:
        time.sleep(max(0.0, self.end_s - time.perf_counter()))
        return self.value


class WaitingDevice:
    """Each plan takes as long as any other, and each row of it makes a token."""

    verifies_trees = False

    def __init__(self) -> None:
        self._free_s = 0.0

    def start(self, plan: Plan) -> Ticket[Result]:
        self._free_s = max(self._free_s, time.perf_counter()) + STEP_S
        token = 1000 + plan.number * 31 % 20000
        rows = [token if row.output is Output.SAMPLE else RowResult() for row in plan.rows]
        return PacedTicket(self._free_s, Result(plan.number, rows, step_s=STEP_S))

    def control(self, message: object) -> Awaited[Answer]:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to close."""


def main() -> int:
    task = msgspec.json.decode(read_first_line(), type=Task)
    wire, heartbeat = Wire(task.endpoint), Heartbeat(task.beat_endpoint)
    heartbeat.start()
    config = EngineConfig.from_options(**task.options)
    wire.send(_describe_model(find_model(task.model, config.revision, progress=False), config))
    cache = KVCache(NUM_BLOCKS, BLOCK_SIZE, (Group(StateSpec("full", bytes_per_position=1), (0,)),))
    engine = Engine(Scheduler(cache, max_num_seqs=NUM_ROWS, max_num_batched_tokens=8192), WaitingDevice())
    tokens = NUM_BLOCKS * BLOCK_SIZE
    wire.send(Ready([("device", "waiting", "")], {}, VOCAB_SIZE, 8, MAX_MODEL_LEN, tokens, NUM_ROWS, *NO_WEIGHTS))
    heartbeat.tell(engine.stats)
    CommandLoop(engine, wire, heartbeat, _prepare).serve()
    wire.close()
    return 0


def _prepare(request: Request) -> object:
    return None


if __name__ == "__main__":
    sys.exit(main())
