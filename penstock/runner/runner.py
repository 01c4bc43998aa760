"""A plan in, a result out: pack, forward, sample."""

from __future__ import annotations

import torch

from penstock.engine.plan import Output, Plan, Result, Row, RowResult
from penstock.models.decoder import Decoder, Encoder
from penstock.runner.memory import BlockMemory
from penstock.runner.rows import Rows
from penstock.runner.step import Step
from penstock.sampling.likeliest import UnusableLogits
from penstock.sampling.sampler import Sampled, Sampler

LOGIT_ROWS = 64      # prompt log probabilities are made from so many rows of logits at a time


class Runner:
    def __init__(self, model: Decoder | Encoder, memory: BlockMemory) -> None:
        self.model = model
        self.memory = memory
        self.rows = Rows(len(memory.grouping.groups), memory.block_size)
        self.sampler = Sampler()
        self._caches = memory.layer_caches(model.spec.kv_shapes())

    @torch.inference_mode()
    def run(self, plan: Plan) -> Result:
        """Rows are taken in before anything can fail, so that later plans find them."""
        self.rows.apply(plan)
        try:
            self.memory.move(plan.moves)
            step = self.rows.pack(plan)
            hidden = self.model.forward(step, self._caches)
            if isinstance(self.model, Encoder):
                return Result(plan.number, [_embedding(e) for e in self.model.pool(hidden, step.query_start)])
            return Result(plan.number, self._sample(self.model, plan, step, hidden))
        except Exception as error:   # whatever a step raises must reach the scheduler, which finds the cause
            return Result(plan.number, error=f"{type(error).__name__}: {error}")

    def _sample(self, model: Decoder, plan: Plan, step: Step, hidden: torch.Tensor) -> list[RowResult]:
        results = [RowResult() for _ in plan.rows]
        ends = step.query_start[1:].tolist()
        for row, end, result in zip(plan.rows, ends, results):
            if row.prompt_logprobs:
                self._prompt_logprobs(model, row, hidden[end - row.count:end], result)
        wanted = [(i, end) for i, (row, end) in enumerate(zip(plan.rows, ends)) if row.output is Output.SAMPLE]
        at = [p for i, end in wanted for p in range(end - 1 - len(plan.rows[i].draft), end)]
        logits = model.logits(hidden, torch.tensor(at, dtype=torch.int64))
        first = 0
        for i, _ in wanted:
            row = plan.rows[i]
            last = first + 1 + len(row.draft)
            self._take(row, self._choose(row, logits[first:last]), results[i])
            first = last
        return results

    def _choose(self, row: Row, logits: torch.Tensor) -> list[Sampled]:
        state = self.rows[row.row].state
        if row.draft:
            return self.sampler.verify(logits, state, row.draft)
        return self.sampler.sample(logits, [state])

    def _take(self, row: Row, sampled: list[Sampled], result: RowResult) -> None:
        """Keep the row's new tokens; beams get theirs from the host."""
        result.error = result.error or next((one.error for one in sampled if one.error), None)
        if result.error:
            return
        if sampled[0].candidates:
            result.candidates = sampled[0].candidates
            return
        result.tokens = tuple(one.token for one in sampled)
        result.logprobs = tuple(one.logprobs for one in sampled if one.logprobs is not None)
        for token in result.tokens:
            self.rows[row.row].state.append(token)

    def _prompt_logprobs(self, model: Decoder, row: Row, hidden: torch.Tensor, result: RowResult) -> None:
        state = self.rows[row.row].state
        targets = state.tokens[row.start + 1:min(row.start + row.count + 1, state.num_prompt)]
        num = state.request.sampling.prompt_logprobs or 0
        try:
            for first in range(0, len(targets), LOGIT_ROWS):
                part = targets[first:first + LOGIT_ROWS]
                logits = model.logits(hidden, torch.arange(first, first + len(part)))
                result.prompt_logprobs += tuple(self.sampler.prompt_logprobs(logits, part, num))
        except UnusableLogits as error:
            result.error = str(error)


def _embedding(values: torch.Tensor) -> RowResult:
    if not values.isfinite().all():
        return RowResult(error="the embedding contains NaN or infinity: the model's weights or arithmetic are damaged")
    return RowResult(embedding=tuple(values.tolist()))
