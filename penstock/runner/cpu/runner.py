"""The executor of one CPU: pack a plan, compute it, sample."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

from penstock.draft.drafters import Drafters
from penstock.engine.draft_tree import find_child
from penstock.engine.executor import Answer, Awaited, Describe, Done, DropLora, LoadLora, Values, obey
from penstock.engine.plan import Output, Plan, Result, Row, RowResult
from penstock.errors import RankLost
from penstock.layers import Head
from penstock.layers.memory import KvCache, LatentCache
from penstock.models.decoder import Decoder, Encoder
from penstock.models.memory import Memory
from penstock.ops import argmax, cpu
from penstock.runner.cpu.buffers import MAX_TAPED_TOKENS, Buffers, Shape
from penstock.runner.cpu.tapes import Tapes
from penstock.runner.cpu.trees import has_trees, move_paths
from penstock.runner.loras import LoraBank
from penstock.runner.memory import BlockMemory
from penstock.runner.rows import (
    RunningRow,
    RunningRows,
    add_prompt_logprobs,
    add_sampled,
    find_logits_indices,
    list_owners,
    make_embedding,
)
from penstock.runner.step import ends_of
from penstock.runner.store.blocks import BlockStore
from penstock.runner.store.transfer import transfer
from penstock.sampling.grammar.compiler import GrammarCompiler
from penstock.sampling.logits import Array, UnusableLogits
from penstock.sampling.row import Chooser, RowState
from penstock.sampling.sampler import Sampled, Sampler


class StepOutput:
    """`hidden` [T, C], and if any were wanted `logits` [M, V] float32; `taps` [T, C], inputs of some layers. A replayed
    step fills the same one again."""

    def __init__(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor | None = None,
        argmax: torch.Tensor | None = None,
        taps: Sequence[torch.Tensor] = (),
    ) -> None:
        self.hidden, self.logits, self.argmax, self.taps = hidden, logits, argmax, taps
        self._values: Array | None = None  # a view of `logits`; made after the tape

    @property
    def values(self) -> Array:
        """[M, V]."""
        if self._values is None:
            assert self.logits is not None
            self._values = self.logits.numpy()
        return self._values


class StepDrafter(Protocol):
    """Drafts within a step, from the tokens that it gave and what it left in memory."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose inputs the step is to keep."""

    @property
    def reads_hidden(self) -> bool:
        """True if the hidden states of all tokens are read."""

    def follow(self, plan: Plan, rows: Sequence[RunningRow]) -> None:
        """Take note of the rows' new blocks, before anything is written to them."""

    def verify(self, row: Row, device: RunningRow, logits: Array) -> list[Sampled] | None:
        """Verify a row's draft in its own way, from logits [1 + k, V]; None to compare it with the target's tokens."""

    def draft(self, plan: Plan, rows: Sequence[RunningRow], computed: StepOutput, results: Sequence[RowResult]) -> None:
        """Add draft tokens to the results."""


class Runner:
    drafter: StepDrafter | None = None

    def __init__(
        self,
        model: Decoder | Encoder,
        memory: BlockMemory,
        grammars: GrammarCompiler | None = None,
        drafters: Drafters | None = None,
        drafting: Sequence[Memory | None] = (),
        loras: LoraBank | None = None,
        store: BlockStore | None = None,
    ) -> None:
        """`drafting`: memories of a drafting model's layers, which come after the model's own."""
        self.loras, self.store = loras, store
        self.model = model
        self.memory = memory
        self.rows = RunningRows(len(memory.grouping.groups), grammars, drafters)
        self.sampler = Sampler()
        self.tapes: Tapes[StepOutput] = Tapes()
        views = memory.views([*model.spec.memories(), *drafting])
        self.caches, self.drafting_caches = views[: model.spec.num_layers], views[model.spec.num_layers :]
        self.verifies_trees = all(isinstance(cache, KvCache | LatentCache | None) for cache in self.caches)
        self._buffers = self.make_buffers(MAX_TAPED_TOKENS, MAX_TAPED_TOKENS, model.spec.max_model_len)

    def start(self, plan: Plan) -> Done[Result]:
        return Done(self.run(plan))

    def control(self, message: object) -> Awaited[Answer]:
        if self.loras is not None and isinstance(message, LoadLora):
            return self.loras.load(message)
        if self.loras is not None and isinstance(message, DropLora):
            return self.loras.drop(message)
        told: Values = {"device": "cpu", "num_plans": self.rows.num_plans, "cache_bytes": self.memory.blocks.nbytes}
        return Done(obey(message, {Describe: lambda _: told}))

    def close(self) -> None:
        """Give up weights and cache, whoever still holds the runner."""
        loras: LoraBank | None = getattr(self, "loras", None)
        store: BlockStore | None = getattr(self, "store", None)
        if store is not None:
            store.close()
        if loras is not None:
            loras.close()
        vars(self).clear()

    def run(self, plan: Plan) -> Result:
        """Run a plan. Rows are applied before anything can fail, so that later plans find them."""
        self.rows.apply(plan)
        try:
            is_lost = bool(transfer(plan, self.memory, self.store))
            if is_lost or not plan.rows:
                return Result(plan.number, lost=is_lost)
            self._prepare_memory(plan)
            return self._embed(self.model, plan) if isinstance(self.model, Encoder) else self._sample(self.model, plan)
        except RankLost:
            raise  # of other ranks' steps too
        except Exception as error:  # whatever a step raises must reach the scheduler, which finds the cause
            return Result(plan.number, error=f"{type(error).__name__}: {error}")

    def apply(self, plan: Plan) -> None:
        """Take note of a plan, whose step is not computed, or later. Its blocks are there, or it loads none."""
        self.rows.apply(plan)
        transfer(plan, self.memory, self.store)

    def compute(self, plan: Plan) -> StepOutput:
        """Run a plan but for the choice of tokens, which another rank makes."""
        self.apply(plan)
        self._prepare_memory(plan)
        model, rows = self.model, self.rows.of(plan)
        assert isinstance(model, Decoder)
        if not isinstance(model.head, Head):
            return self._prepare(model, plan, rows, [])()
        ends, at = find_logits_indices(plan)
        computed = self._prepare(model, plan, rows, at)()
        for row, end in zip(plan.rows, ends):
            if row.prompt_logprobs:
                self._prompt_logprobs(model, row, computed.hidden[end - row.count : end], RowResult())
        return computed

    def _prepare_memory(self, plan: Plan) -> None:
        """Enter the plan's adapters and copy its blocks."""
        if self.loras is not None:
            for admission in plan.admissions:
                self.loras.enter(admission.adapter, admission.request.loras)
        if plan.moves:
            with use_torch():
                self.memory.move(plan.moves)

    def _embed(self, model: Encoder, plan: Plan) -> Result:
        rows = [self.rows[row.row] for row in plan.rows]
        buffers = self.make_buffers(plan.num_tokens, len(rows), 0)
        shape = buffers.fill(plan, rows, ())
        begin = time.perf_counter()
        with use_torch():
            step = buffers.step(shape)
            pooled = model.pool(model.forward(step, self.caches), step.query_start)
            results = [make_embedding(values) for values in pooled]
        step_s = time.perf_counter() - begin
        return Result(plan.number, results, forward_s=step_s, step_s=step_s)

    def _sample(self, model: Decoder, plan: Plan) -> Result:
        rows = [self.rows[row.row] for row in plan.rows]
        if self.drafter is not None:
            self.drafter.follow(plan, rows)
        ends, at = find_logits_indices(plan)
        compute = self._prepare(model, plan, rows, at)
        begin = time.perf_counter()
        computed = compute()
        middle = time.perf_counter()
        likeliest = computed.argmax.tolist() if computed.argmax is not None else []
        results: list[RowResult] = []
        first, drafters = 0, self.rows.drafters
        for row, device, end in zip(plan.rows, rows, ends):
            result = RowResult()
            results.append(result)
            if row.prompt_logprobs:
                self._prompt_logprobs(model, row, computed.hidden[end - row.count : end], result)
            if row.output is Output.SAMPLE:
                last = first + 1 + len(row.draft)
                self._sample_row(row, device, computed.values[first:last], likeliest[first:last], result)
                first = last
                if row.draft:
                    device.watch(row, likeliest[last - 1 - len(row.draft) : last], result)
                if drafters is not None and plan.min_chance is not None and plan.min_chance < 1:
                    device.propose(result, drafters.max_tokens, plan.min_chance)
        if has_trees(plan):
            with use_torch():
                move_paths(plan, rows, results, self.caches, self.memory.block_size)
        now = time.perf_counter()
        if self.drafter is not None:
            self.drafter.draft(plan, rows, computed, results)
        draft_s = time.perf_counter() - now if self.drafter is not None else 0.0
        return Result(plan.number, results, None, middle - begin, now - middle, now - begin, draft_s)

    def _prepare(
        self, model: Decoder, plan: Plan, rows: Sequence[RunningRow], at: Sequence[int]
    ) -> Callable[[], StepOutput]:
        """Fill in the step's numbers; returns the forward pass."""
        small = plan.num_tokens <= MAX_TAPED_TOKENS
        longest = max(row.start + row.count for row in plan.rows)
        buffers = self._buffers if small else self.make_buffers(plan.num_tokens, len(rows), longest)
        shape = buffers.fill(plan, rows, at)
        if small:
            return partial(self.tapes.run, shape, partial(self._forward, model, buffers, shape))
        reads_all = not isinstance(model.head, Head) or self.drafter is not None and self.drafter.reads_hidden
        reads_all = reads_all or any(row.prompt_logprobs for row in plan.rows)
        return partial(self._forward, model, buffers, shape, None if reads_all else list_owners(plan))

    def make_buffers(self, num_tokens: int, num_sequences: int, longest: int) -> Buffers:
        return Buffers(num_tokens, num_sequences, self.memory.grouping.groups, longest, self.memory.block_size)

    def _forward(self, model: Decoder, buffers: Buffers, shape: Shape, owners: list[int] | None = None) -> StepOutput:
        """Compute a step; with `owners`, the sequences of the wanted tokens, their hidden states only."""
        with use_torch():
            step, at = buffers.step(shape), buffers.tokens_at(shape)
            if owners is not None and at is not None:
                step.ends, at = ends_of(step, at, torch.tensor(owners, dtype=torch.int64)), None
            taps = {} if self.drafter is None else {layer: step.ids for layer in self.drafter.taps}
            hidden = model.forward(step, self.caches, taps)
            kept = list(taps.values())
            if not shape.num_logits:
                return StepOutput(hidden, taps=kept)
            logits = model.logits(hidden, at, buffers.adapters_at(shape))
            return StepOutput(hidden, logits, argmax(logits), kept)

    def _sample_row(self, row: Row, device: RunningRow, logits: Array, likeliest: list[int], result: RowResult) -> None:
        """Sample the row's tokens from its logits [1 + k, V], those of k draft tokens included."""
        taken: tuple[int, ...] = ()
        state = device.state
        sampled = self.drafter.verify(row, device, logits) if self.drafter is not None else None
        if sampled is not None:
            add_sampled(state, sampled, result)
            return
        if state.chooser is Chooser.ARGMAX and not result.error:
            taken = _verify_greedy(row, state, logits, likeliest)
        if not taken:
            add_sampled(state, self.sampler.verify(logits, state, row.draft), result)
            return
        result.tokens = taken
        for token in taken:
            state.append(token)

    def _prompt_logprobs(self, model: Decoder, row: Row, hidden: torch.Tensor, result: RowResult) -> None:
        try:
            with use_torch():
                add_prompt_logprobs(model, self.sampler, row, self.rows[row.row], hidden, result)
        except UnusableLogits as error:
            result.error = str(error)


def _verify_greedy(row: Row, state: RowState, logits: Array, likeliest: list[int]) -> tuple[int, ...]:
    """Return the likeliest tokens as far as the draft has them, and one more; none if the first logit is not finite."""
    taken: list[int] = []
    last: int | None = -1
    while last is not None:
        token = likeliest[last + 1]
        if not math.isfinite(logits[last + 1, token]):
            break
        taken.append(token)
        if token in state.stops:
            break
        last = find_child(row.draft, last, token)
    return tuple(taken)


@contextmanager
def use_torch() -> Iterator[None]:
    """Guard code in which torch computes or makes tensors. Replayed steps do without it."""
    with torch.inference_mode(), cpu.limit_torch():
        yield
