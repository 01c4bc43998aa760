"""A plan in, a result out: pack, forward, sample."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from penstock.engine.plan import Output, Plan, Result, Row, RowResult
from penstock.models.decoder import Decoder, Encoder
from penstock.ops import argmax, cpu
from penstock.runner.buffers import Buffers, Shape
from penstock.runner.computed import Computed
from penstock.runner.memory import BlockMemory
from penstock.runner.rows import DeviceRow, Rows
from penstock.runner.sampling import embedding, prompt_logprobs, take
from penstock.runner.step import ends_of
from penstock.runner.tapes import Tapes
from penstock.sampling.arrays import Array, UnusableLogits
from penstock.sampling.grammars import Grammars
from penstock.sampling.row import RowState
from penstock.sampling.sampler import Sampler

SMALL = 64  # tokens: of larger steps Python is a small part, and their shapes seldom return


class Runner:
    def __init__(self, model: Decoder | Encoder, memory: BlockMemory, grammars: Grammars | None = None) -> None:
        self.model = model
        self.memory = memory
        self.rows = Rows(len(memory.grouping.groups), grammars)
        self.sampler = Sampler()
        self.tapes: Tapes[Computed] = Tapes()
        self._caches = memory.layer_caches(model.spec.kv_shapes())
        self._buffers = Buffers(SMALL, SMALL, self.rows.num_groups, -(-model.spec.max_model_len // memory.block_size))

    def run(self, plan: Plan) -> Result:
        """Rows are taken in before anything can fail, so that later plans find them."""
        self.rows.apply(plan)
        try:
            if plan.moves:
                with _torch():
                    self.memory.move(plan.moves)
            return self._embed(self.model, plan) if isinstance(self.model, Encoder) else self._sample(self.model, plan)
        except Exception as error:  # whatever a step raises must reach the scheduler, which finds the cause
            return Result(plan.number, error=f"{type(error).__name__}: {error}")

    def _embed(self, model: Encoder, plan: Plan) -> Result:
        rows = [self.rows[row.row] for row in plan.rows]
        buffers = Buffers(plan.num_tokens, len(rows), self.rows.num_groups, 0)
        shape = buffers.fill(plan, rows, (), self.memory.block_size)
        begin = time.perf_counter()
        with _torch():
            step = buffers.step(shape)
            pooled = model.pool(model.forward(step, self._caches), step.query_start)
            results = [embedding(values) for values in pooled]
        return Result(plan.number, results, forward_s=time.perf_counter() - begin)

    def _sample(self, model: Decoder, plan: Plan) -> Result:
        rows = [self.rows[row.row] for row in plan.rows]
        ends, at = _wanted(plan)
        compute = self._prepare(model, plan, rows, at)
        begin = time.perf_counter()
        computed = compute()
        middle = time.perf_counter()
        likeliest = computed.likeliest if at else []
        results: list[RowResult] = []
        first = 0
        for row, device, end in zip(plan.rows, rows, ends):
            result = RowResult()
            results.append(result)
            if row.prompt_logprobs:
                self._prompt_logprobs(model, row, computed.hidden[end - row.count : end], result)
            if row.output is Output.SAMPLE:
                last = first + 1 + len(row.draft)
                self._choose(row, device.state, computed.values[first:last], likeliest[first], result)
                first = last
        return Result(plan.number, results, forward_s=middle - begin, sampling_s=time.perf_counter() - middle)

    def _prepare(
        self, model: Decoder, plan: Plan, rows: Sequence[DeviceRow], at: Sequence[int]
    ) -> Callable[[], Computed]:
        """Fill in the step's numbers; what remains is the forward pass."""
        small = plan.num_tokens <= SMALL
        buffers = self._buffers if small else self._spacious(plan, rows)
        shape = buffers.fill(plan, rows, at, self.memory.block_size)
        if small:
            return partial(self.tapes.run, shape, partial(self._forward, model, buffers, shape))
        return partial(
            self._forward,
            model,
            buffers,
            shape,
            None if any(row.prompt_logprobs for row in plan.rows) else _owners(plan),
        )

    def _spacious(self, plan: Plan, rows: Sequence[DeviceRow]) -> Buffers:
        """For one large step."""
        width = max(len(table) for row in rows for table in row.tables)
        return Buffers(plan.num_tokens, len(rows), self.rows.num_groups, width)

    def _forward(self, model: Decoder, buffers: Buffers, shape: Shape, owners: list[int] | None = None) -> Computed:
        """With the owners of the tokens whose logits are wanted no other hidden states are computed."""
        with _torch():
            step, at = buffers.step(shape), buffers.wanted(shape)
            ends = None
            if owners is not None and at is not None:
                ends, at = ends_of(step, at, torch.tensor(owners, dtype=torch.int64)), None
            hidden = model.forward(step, self._caches, ends)
            if not shape.num_logits:
                return Computed(hidden)
            logits = model.logits(hidden, at)
            return Computed(hidden, logits, argmax(logits))

    def _choose(self, row: Row, state: RowState, logits: Array, likeliest: int, result: RowResult) -> None:
        """The row's tokens from its logits [1 + k, V], those of k guesses included."""
        if state.plain and not row.draft and not result.error and math.isfinite(logits[0, likeliest]):
            result.tokens = (likeliest,)
            state.append(likeliest)
        else:
            take(state, self.sampler.verify(logits, state, row.draft), result)

    def _prompt_logprobs(self, model: Decoder, row: Row, hidden: torch.Tensor, result: RowResult) -> None:
        try:
            with _torch():
                prompt_logprobs(model, self.sampler, row, self.rows[row.row].state, hidden, result)
        except UnusableLogits as error:
            result.error = str(error)


@contextmanager
def _torch() -> Iterator[None]:
    """Where torch computes, or makes tensors that others will see. Replayed steps do without it."""
    with torch.inference_mode(), cpu.torch_alone():
        yield


def _wanted(plan: Plan) -> tuple[list[int], list[int]]:
    """Where each row's tokens end in the step, and the tokens whose logits are wanted: guesses want theirs too."""
    ends: list[int] = []
    at: list[int] = []
    end = 0
    for row in plan.rows:
        end += row.count
        ends.append(end)
        if row.output is Output.SAMPLE:
            at += range(end - 1 - len(row.draft), end)
    return ends, at


def _owners(plan: Plan) -> list[int]:
    """Whose tokens they are whose logits are wanted."""
    return [s for s, row in enumerate(plan.rows) if row.output is Output.SAMPLE for _ in range(1 + len(row.draft))]
