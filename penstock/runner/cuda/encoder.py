"""Embeddings on a GPU: a plan in, a ticket out. Every sequence is whole in its step, and nothing is remembered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event

import numpy as np
import torch

import penstock.ops.triton.bodies  # noqa: F401  registers the bodies
from penstock import ops
from penstock.engine.executor import Answer, Describe, Done, Values, obey
from penstock.engine.plan import Plan, Result, Row
from penstock.models.decoder import Encoder
from penstock.ops.triton.tuning import ATTENTION_TILE_ROWS
from penstock.runner.cuda.staging import Staging, free_gpu_memory, record_event
from penstock.runner.rows import RunningRow, RunningRows, make_embedding
from penstock.runner.step import Step

ALIGNED = 4  # numbers of 4 bytes: kernels are compiled anew for parts that begin elsewhere


@dataclass
class EncoderTicket:
    """A started plan: its embeddings are on their way."""

    number: int
    values: torch.Tensor | None = None  # [S, C], pinned; there once `done` has happened
    begun: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None
    error: str | None = None

    def result(self) -> Result:
        if self.error is not None or self.values is None or self.begun is None or self.done is None:
            return Result(self.number, error=self.error or "the plan was never started")
        try:
            waiting = time.perf_counter()
            self.done.synchronize()
            waited_s = time.perf_counter() - waiting
            step_s = self.begun.elapsed_time(self.done) / 1e3
            return Result(self.number, [make_embedding(values) for values in self.values], None, waited_s, 0.0, step_s)
        except Exception as error:  # whatever a step raises must reach the scheduler, which finds the cause
            return Result(self.number, error=f"{type(error).__name__}: {error}")


class EncoderRunner:
    verifies_trees = False

    def __init__(
        self,
        model: Encoder,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        device: torch.device,
        deterministic: bool = False,
    ) -> None:
        self.model, self.deterministic = model, deterministic
        self.rows = RunningRows(0)
        tiles = max_num_seqs + max_num_batched_tokens // ATTENTION_TILE_ROWS
        room = 2 * max_num_batched_tokens + max_num_seqs + 1 + 2 * tiles + 4 * ALIGNED
        self._staging = Staging(room, device)

    def warm(self) -> None:
        """Compile the kernels of steps: one token takes others than several."""
        with torch.inference_mode():
            for count in (1, 2):
                self._forward(self._pack([list(range(count))])).cpu()

    def close(self) -> None:
        """Give up the weights, whoever still holds the runner."""
        vars(self).clear()
        free_gpu_memory()

    def prepare(self, is_compiled: Event | None = None) -> bool:
        """Nothing is captured."""
        return False

    def control(self, message: object) -> Done[Answer]:
        told: Values = {"device": str(self._staging.device), "num_plans": self.rows.num_plans, "cache_bytes": 0}
        return Done(obey(message, {Describe: lambda _: told}))

    def start(self, plan: Plan) -> EncoderTicket:
        """Start a plan. Rows are applied before anything can fail, so that later plans find them."""
        ticket = EncoderTicket(plan.number)
        try:
            self.rows.apply(plan)
            tokens = [_tokens(row, self.rows[row.row]) for row in plan.rows]
            with torch.inference_mode():
                ticket.begun = record_event()
                pooled = self._forward(self._pack(tokens))
                ticket.values = torch.empty(pooled.shape, dtype=pooled.dtype, pin_memory=True)
                ticket.values.copy_(pooled, non_blocking=True)
                ticket.done = record_event()
        except Exception as error:  # whatever a step raises must reach the scheduler, which finds the cause
            ticket.error = f"{type(error).__name__}: {error}"
        return ticket

    def _forward(self, step: Step) -> torch.Tensor:
        return self.model.pool(self.model.forward(step), step.query_start)

    def _pack(self, sequences: Sequence[Sequence[int]]) -> Step:
        """Pack sequences into a step on the device."""
        counts = [len(tokens) for tokens in sequences]
        tiles = [(s, first) for s, count in enumerate(counts) for first in range(0, count, ATTENTION_TILE_ROWS)]
        numbers = [
            np.concatenate([np.asarray(tokens, dtype=np.int32) for tokens in sequences]),
            np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
            np.cumsum([0, *counts]),
            np.asarray(tiles, dtype=np.int32).reshape(-1),
        ]
        begins = np.cumsum([0, *(-(-len(part) // ALIGNED) * ALIGNED for part in numbers)]).tolist()
        buffer = self._staging.take()
        for begin, part in zip(begins, numbers):
            buffer[begin : begin + len(part)] = part
        sent = self._staging.send(begins[-1])
        ids, positions, starts, dealt = (sent[begin : begin + len(part)] for begin, part in zip(begins, numbers))
        return Step(ids.long(), positions.long(), [], [], starts, starts.diff(), ops.Work(0, dealt.view(-1, 2)))


def _tokens(row: Row, device: RunningRow) -> list[int]:
    known = device.inputs(row)
    if row.start or -1 in known:
        raise RuntimeError(f"row {row.row} has {row.count} tokens from {row.start} on: an encoder's must be whole")
    return known
