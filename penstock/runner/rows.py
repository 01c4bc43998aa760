"""Host-side state of each running row, and its results."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from penstock.draft.drafters import FAILED, Drafters, RowDrafts
from penstock.engine.plan import Admission, Output, Plan, Row, RowResult
from penstock.models.decoder import Decoder
from penstock.ops import AdapterRows
from penstock.sampling.grammar.compiler import GrammarCompiler
from penstock.sampling.row import RowState
from penstock.sampling.sampler import Sampled, Sampler

_log = logging.getLogger(__name__)


class RunningRow:
    """A sequence's tokens and sampling state, its drafts, and its block table in each group."""

    drafts: RowDrafts | None = None
    net: Any = None  # a drafting model's part of the row
    adapter: int  # slot of its adapters, -1 for none

    def __init__(self, admission: Admission, num_groups: int, grammars: GrammarCompiler | None) -> None:
        self.state = RowState(
            admission.request,
            admission.sibling,
            admission.tokens,
            len(admission.request.tokens),
            grammars,
            admission.mu,
        )
        self.adapter = admission.adapter
        self.tables = [np.empty(0, dtype=np.int32) for _ in range(num_groups)]  # -1: no block
        self.version = 0  # grows when a table changes

    def apply(self, row: Row) -> None:
        for g, changes in enumerate(row.blocks):
            if changes:
                self._enter(g, changes)
        for token in row.tokens:
            self.state.append(token)

    def _enter(self, g: int, changes: dict[int, int]) -> None:
        self.version += 1
        indices, blocks = next(iter(changes.items())) if len(changes) == 1 else pack_entries([changes])
        table, last = self.tables[g], max(changes)
        if last >= len(table):
            room = np.full(max(16, last + 1 - len(table), len(table)), -1, dtype=np.int32)
            table = self.tables[g] = np.concatenate((table, room))
        table[indices] = blocks

    def inputs(self, row: Row, shift: int = 0) -> list[int]:
        """Return the tokens `shift` after the row's positions, drafts included; -1 for one that only the device knows
        yet. Of a draft that is longer than the row's count, the last tokens."""
        num_known = row.count - len(row.draft)
        if num_known < 0:
            return [draft.token for draft in row.draft[-row.count :]]
        first = row.start + shift
        known = self.state.tokens[first : first + num_known]
        return known + [-1] * (num_known - len(known)) + [draft.token for draft in row.draft]

    def watch(self, row: Row, answers: Sequence[int], result: RowResult) -> None:
        """Tell the drafters what the model would say after each token of the row's draft, if that is a line."""
        is_line = all(draft.parent == place - 1 for place, draft in enumerate(row.draft))
        if self.drafts is not None and result.tokens and is_line:
            try:
                self.drafts.watch(answers, len(result.tokens))
            except Exception:
                self.drafts = None
                _log.exception(FAILED)

    def propose(self, result: RowResult, max_tokens: int, min_chance: float) -> None:
        """Add draft tokens for the row's next step, unless its answer ends here. If a drafter fails, the row has
        no drafts."""
        if self.drafts is None or not result.tokens or result.error or result.complete:
            return
        try:
            result.draft = self.drafts.propose(max_tokens, min_chance)
        except Exception:
            self.drafts = None
            _log.exception(FAILED)


def pack_entries(changes: Sequence[dict[int, int]]) -> np.ndarray:
    """Pack the indices and blocks of several tables into [2, n]."""
    count = sum(map(len, changes))
    found = np.empty((2, count), dtype=np.int64)
    found[0] = np.fromiter(chain.from_iterable(changes), np.int64, count)
    found[1] = np.fromiter(chain.from_iterable(map(dict.values, changes)), np.int64, count)
    return found


class RunningRows:
    def __init__(
        self, num_groups: int, grammars: GrammarCompiler | None = None, drafters: Drafters | None = None
    ) -> None:
        self.num_groups = num_groups
        self.grammars, self.drafters = grammars, drafters
        self.num_admitted = 0  # since the start
        self.num_plans = 0
        self._rows: dict[int, RunningRow] = {}

    def __getitem__(self, row: int) -> RunningRow:
        return self._rows[row]

    def of(self, plan: Plan) -> list[RunningRow]:
        return [self._rows[row.row] for row in plan.rows]

    def apply(self, plan: Plan) -> None:
        """Apply admissions, new blocks and tokens chosen by the host."""
        self.num_plans += 1
        self.num_admitted += len(plan.admissions)
        for admission in plan.admissions:
            before = self._rows.get(admission.row)
            running = self._rows[admission.row] = RunningRow(admission, self.num_groups, self.grammars)
            if self.drafters is not None:
                if before is not None:
                    self.drafters.finish(before.state)
                running.drafts = self.drafters.start(running.state)
        for row in plan.rows:
            if row.blocks or row.tokens:
                self._rows[row.row].apply(row)


LOGIT_ROWS = 64  # prompt log probabilities are made from so many rows of logits at a time


def add_sampled(state: RowState, sampled: list[Sampled], result: RowResult) -> None:
    """Append the sampled tokens to the row and its result; a beam's tokens come from the host. An error after accepted
    draft tokens is left to the next step, which meets it as it would have without drafts."""
    failed = next((i for i, one in enumerate(sampled) if one.error), None)
    if failed == 0 and not result.error:
        result.error, result.unfit = sampled[0].error, sampled[0].unfit
    sampled = sampled[:failed] if failed else sampled
    if result.error:
        return
    if sampled[0].candidates:
        result.candidates = sampled[0].candidates
        return
    result.tokens = tuple(one.token for one in sampled)
    result.logprobs = tuple(one.logprobs for one in sampled if one.logprobs is not None)
    for one in sampled:
        state.append(one.token, one.mu)
    result.mu = sampled[-1].mu
    if state.guide is not None:
        result.error, result.unfit = state.failure, state.failure is not None
        result.complete = state.is_finished
        result.forced = any(one.forced for one in sampled) or state.is_finished and not state.guide.complete


def add_prompt_logprobs(
    model: Decoder, sampler: Sampler, row: Row, device: RunningRow, hidden: torch.Tensor, result: RowResult
) -> None:
    """Add log probabilities from hidden states [count, C] of a part of the prompt; raises UnusableLogits."""
    state = device.state
    targets = state.tokens[row.start + 1 : min(row.start + row.count + 1, state.num_prompt)]
    num = state.request.sampling.prompt_logprobs or 0
    for first in range(0, len(targets), LOGIT_ROWS):
        part = targets[first : first + LOGIT_ROWS]
        some = hidden[first : first + len(part)]
        logits = model.logits(some, adapters=_fill_adapters(some, device.adapter))
        result.prompt_logprobs += tuple(sampler.prompt_logprobs(logits, part, num))


def _fill_adapters(hidden: torch.Tensor, slot: int) -> Any:
    """Give all rows one slot; None if that is none."""
    if slot < 0:
        return None
    slots = torch.full((len(hidden),), slot, dtype=torch.int32, device=hidden.device)
    return slots if hidden.is_cpu else AdapterRows(slots)


def make_embedding(values: torch.Tensor) -> RowResult:
    if not values.isfinite().all():
        return RowResult(error="the embedding contains NaN or infinity: the model's weights or arithmetic are damaged")
    return RowResult(embedding=tuple(values.tolist()))


def find_logits_indices(plan: Plan) -> tuple[list[int], list[int]]:
    """Return where each row's tokens end in the step, and the tokens whose logits are sampled, drafts included."""
    ends: list[int] = []
    at: list[int] = []
    end = 0
    for row in plan.rows:
        end += row.count
        ends.append(end)
        if row.output is Output.SAMPLE:
            at += range(end - 1 - len(row.draft), end)
    return ends, at


def list_owners(plan: Plan) -> list[int]:
    """For each wanted row of logits, its sequence's index."""
    return [s for s, row in enumerate(plan.rows) if row.output is Output.SAMPLE for _ in range(1 + len(row.draft))]
