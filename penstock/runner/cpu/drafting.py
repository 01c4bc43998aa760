"""A drafting model on a CPU: it catches up with a step's tokens, then goes ahead by single tokens.

What its blocks hold decides how fast an answer comes, and nothing else: every draft token is verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from penstock.cache.group import Group
from penstock.draft.net.net import DraftNet
from penstock.engine.plan import Draft, Output, Plan, Row, RowResult
from penstock.ops import argmax
from penstock.runner.cpu.buffers import MAX_TAPED_TOKENS, Buffers, Shape
from penstock.runner.cpu.draft_branches import BranchMaker
from penstock.runner.cpu.draft_lines import DraftingRunner, Line, LineDrafter, NetRow
from penstock.runner.cpu.runner import Runner, StepOutput, use_torch
from penstock.runner.cpu.tapes import Tapes
from penstock.runner.memory import BlockMemory
from penstock.runner.rows import RunningRow

MAX_CATCH_UP = 512  # tokens of all rows in one step
FedRow = tuple[Row, RunningRow, Line | None, int]  # with the first token of the row's in the target's step


class NetRunner(DraftingRunner, Protocol):
    memory: BlockMemory


class ComputedBlocks:
    """The blocks of the pool that a drafting model has filled, so that rows that share a prefix begin where it is."""

    def __init__(self, num_blocks: int, block_size: int, groups: Sequence[tuple[int, Group]]) -> None:
        self._filled = np.zeros(num_blocks, dtype=bool)
        self._size, self._groups = block_size, groups  # indices and groups of its layers

    def follow(self, row: Row, device: RunningRow) -> NetRow:
        """Forget what stood in the row's new blocks; returns the row's part, cut where a block is not filled."""
        size = self._size
        own: NetRow | None = device.net
        if own is None:
            begin = row.start // size * size
            own = device.net = NetRow(begin, begin)
        for g, _ in self._groups:
            for index, block in row.blocks[g].items() if row.blocks else ():
                if index >= row.start // size:
                    self._filled[block] = False
                elif not self._filled[block]:
                    own.drafted, own.marked = min(own.drafted, index * size), min(own.marked, index * size)
        return own

    def forget(self, blocks: Sequence[int]) -> None:
        """Take note that these come from elsewhere, and may hold nothing of the drafting layers."""
        self._filled[list(blocks)] = False

    def mark(self, device: RunningRow, end: int) -> None:
        """Take note that all positions before `end` are computed."""
        own: NetRow = device.net
        for index in range(own.marked // self._size, end // self._size):
            for g, _ in self._groups:
                self._filled[device.tables[g][index]] = True
        own.marked = max(own.marked, end // self._size * self._size)

    def find_computable(self, row: Row) -> int:
        """Return the first position that the row has all blocks for: with a window, its own first one."""
        return row.start if any(group.spec.kind == "window" for _, group in self._groups) else 0

    def count_room(self, device: RunningRow, begin: int, max_tokens: int) -> int:
        """Return `max_tokens`, or where the row's blocks from `begin` on end if that is less."""
        for g, _ in self._groups:
            table = device.tables[g]
            for index in range(begin // self._size, -(-max_tokens // self._size)):
                if index >= len(table) or table[index] < 0:
                    max_tokens = index * self._size
                    break
        return max_tokens


class FollowingDrafter(LineDrafter):
    """A drafter whose model keeps keys and values of its own, row by row as far as the target has come."""

    def __init__(self, runner: NetRunner, net: DraftNet) -> None:
        super().__init__(runner, net.name, net.target_ids)
        self.net = net
        first = runner.model.spec.num_layers
        groups = runner.memory.grouping.groups
        self._drafting = [(g, group) for g, group in enumerate(groups) if net.is_target or group.layers[-1] >= first]
        self._blocks = ComputedBlocks(len(runner.memory.blocks), runner.memory.block_size, self._drafting)

    def follow(self, plan: Plan, rows: Sequence[RunningRow]) -> None:
        for load in plan.loads:
            self._blocks.forget(load.blocks)
        for row, device in zip(plan.rows, rows):
            self._blocks.follow(row, device)

    def _plan_rows(
        self, plan: Plan, rows: Sequence[RunningRow], results: Sequence[RowResult], lines: list[Line], room: int
    ) -> list[FedRow]:
        """Return the rows that the model is behind, and begin the lines of those to be drafted for."""
        fed: list[FedRow] = []
        end = 0
        for row, device, result in zip(plan.rows, rows, results):
            end += row.count
            found = self._plan_row(plan, row, device, result, room)
            if found is not None:
                room = max(0, room - found[0].count)
                fed.append((*found, end - row.count))
                if found[2] is not None:
                    lines.append(found[2])
        return fed

    def _plan_row(
        self, plan: Plan, row: Row, device: RunningRow, result: RowResult, room: int
    ) -> tuple[Row, RunningRow, Line | None] | None:
        """Return the positions that the row is behind, `room` of them at most, and its line if it is to be drafted for.
        A model with features takes them all: later they are gone."""
        net, state, own = self.net, device.state, device.net
        assert isinstance(own, NetRow)
        if row.output is Output.POOL or state.request.beam is not None or result.error:
            return None
        until = len(state.tokens) - net.shift if row.output is Output.SAMPLE else row.start + row.count
        if net.is_target:
            own.drafted = until - 1
        for token in own.ahead:
            if own.drafted + 1 >= until or state.tokens[own.drafted] != token:
                break
            own.drafted += 1
        own.ahead = []
        begin = max(min(own.drafted, until - 1), self._blocks.find_computable(row), row.start if net.shift else 0)
        line = None
        if row.output is Output.SAMPLE and (net.shift or until - begin <= room):
            line = self._begin_line(plan, row, device, result, until)
        if line is None and (net.is_target or not net.shift and row.output is Output.SAMPLE and until - begin == 1):
            return None
        until = min(until, net.max_model_len, begin + (until if net.shift else room))
        if until <= begin:
            return None
        own.drafted = until
        output = Output.NONE if line is None else Output.SAMPLE
        return Row(row.row, begin, until - begin, output), device, line

    def _begin_line(self, plan: Plan, row: Row, device: RunningRow, result: RowResult, until: int) -> Line | None:
        room = self._blocks.count_room(device, until, min(until + plan.ahead, self.net.max_model_len))
        ahead = min(plan.ahead, room - until + 1)
        assert isinstance(device.net, NetRow)
        return self.lines.begin(row, device, device.net, result, ahead, plan.draft_price) if ahead > 0 else None


def find_features(plan: Plan, fed: Sequence[FedRow]) -> list[int]:
    """Return, for each token to be computed, the target's token that has its features."""
    starts = {row.row: row.start for row in plan.rows}
    return [first + row.start - starts[row.row] + i for row, _, _, first in fed for i in range(row.count)]


class NetDrafter(FollowingDrafter):
    """Runs a model that drafts one token after the other."""

    def __init__(self, runner: Runner, net: DraftNet, tree: bool = False) -> None:
        super().__init__(runner, net)
        self._branches = BranchMaker(self.lines) if tree else None
        self._runner = runner
        self.taps, self.reads_hidden = net.taps, net.shift > 0 and not net.taps
        self.tapes: Tapes[StepOutput] = Tapes()
        self._caches = runner.caches if net.is_target else runner.drafting_caches
        self._buffers = runner.make_buffers(MAX_TAPED_TOKENS, MAX_TAPED_TOKENS, runner.model.spec.max_model_len)
        width, count = runner.model.spec.width, max(1, len(net.taps))
        self._given = [torch.zeros(MAX_TAPED_TOKENS, width) for _ in range(count if net.shift else 0)]
        self._own = torch.zeros(MAX_TAPED_TOKENS, width)

    def fill(
        self,
        plan: Plan,
        rows: Sequence[RunningRow],
        computed: StepOutput,
        results: Sequence[RowResult],
        lines: list[Line],
    ) -> None:
        """Catch up, then go ahead. A model with features does the first in every step: later they are gone."""
        if not plan.ahead and not self.net.shift:
            return
        fed = self._plan_rows(plan, rows, results, lines, MAX_CATCH_UP)
        if not fed:
            return
        step = Plan(plan.number, tuple(row for row, _, _, _ in fed))
        ends = np.cumsum([row.count for row in step.rows]).tolist()
        at = [last - 1 for last, (_, _, line, _) in zip(ends, fed) if line is not None]
        features = self._take_features(plan, fed, computed) if self.net.shift else None
        out = self._run(step, [device for _, device, _, _ in fed], at, features, "catch up")
        for row, device, _, _ in fed:
            self._blocks.mark(device, row.start + row.count)
        self._go_ahead(plan, lines, out, at)

    def _take_features(self, plan: Plan, fed: Sequence[FedRow], computed: StepOutput) -> list[torch.Tensor]:
        """Gather the target's features of the tokens to be computed."""
        with use_torch():
            at = torch.tensor(find_features(plan, fed))
            return [values[at] for values in (computed.taps or [computed.hidden])]

    def _run(
        self,
        step: Plan,
        rows: Sequence[RunningRow],
        at: Sequence[int],
        features: Sequence[torch.Tensor] | None,
        kind: str,
    ) -> StepOutput:
        """Compute positions of rows. Features are the target's, or after the first token the model's own."""
        net, count = self.net, step.num_tokens
        small = count <= MAX_TAPED_TOKENS
        longest = max(row.start + row.count for row in step.rows)
        buffers = self._buffers if small else self._runner.make_buffers(count, len(rows), longest)
        shape = buffers.fill(step, rows, at, net.shift)
        if not net.is_target:
            shape = shape._replace(has_adapters=False)
        if net.own_ids is not None:
            buffers.ids[:count] = net.own_ids[buffers.ids[:count]]
        inputs: Sequence[torch.Tensor] = features or ()
        if small and features is not None:
            kept = self._given if kind == "catch up" else [self._own]
            with use_torch():
                for to, values in zip(kept, features):
                    to[:count] = values
            inputs = [values[:count] for values in kept]
        compute = partial(self._forward, buffers, shape, inputs, kind)
        return self.tapes.run((shape, kind), compute) if small else compute()

    def _forward(self, buffers: Buffers, shape: Shape, features: Sequence[torch.Tensor], kind: str) -> StepOutput:
        net = self.net
        with use_torch():
            joined = None
            if features:
                joined = net.join(features) if kind == "catch up" else features[0]
            out = net.forward(buffers.step(shape), joined, self._caches)
            if not shape.num_logits:
                return StepOutput(out)
            logits = net.logits(out, buffers.tokens_at(shape))
            return StepOutput(out, logits, argmax(logits))

    def _go_ahead(self, plan: Plan, lines: Sequence[Line], out: StepOutput, at: Sequence[int]) -> None:
        """Draw a token for each line, then compute it for those that go on."""
        if self._branches is not None:
            self._branch_out(self._branches, plan, lines, out, at)
            return
        going = list(lines)
        while going:
            assert out.argmax is not None
            likeliest, min_chance = out.argmax.tolist(), plan.min_chance or 0.0
            kept = [
                i for i, one in enumerate(going)
                if self.lines.extend(one, out.values[i], likeliest[i], min_chance)
            ]  # fmt: skip
            going = [going[i] for i in kept]
            if not going:
                return
            features = None
            if self.net.shift:
                with use_torch():
                    features = [out.hidden[torch.tensor([at[i] for i in kept])]]
            step = Plan(plan.number, tuple(self._make_ahead_row(line) for line in going))
            at = range(len(going))
            out = self._run(step, [line.device for line in going], at, features, "go ahead")

    def _branch_out(
        self, branches: BranchMaker, plan: Plan, lines: Sequence[Line], out: StepOutput, at: Sequence[int]
    ) -> None:
        """Grow a tree for each line, level by level; `at` are the tokens of `out` that have logits."""
        min_chance = plan.min_chance or 0.0
        level = [(line, [-1]) for line in lines]
        while level:
            assert out.argmax is not None
            likeliest, logits = out.argmax.tolist(), iter(range(len(at)))
            following: list[tuple[Line, list[int]]] = []
            parents: list[int] = []  # for each node to be computed, its parent's token in `out`
            for line, nodes in level:
                since, rows = len(line.drafts), {}
                for node in nodes:
                    rows[node] = i = next(logits)
                    branches.grow(line, node, out.values[i], likeliest[i])
                chosen = branches.choose(line, since, min_chance, line.most - 1 - len(line.computed))
                if chosen:
                    following.append((line, chosen))
                    parents += [at[rows[line.drafts[node].parent]] for node in chosen]
            level = following
            if not level:
                break
            features = None
            if self.net.shift:
                with use_torch():
                    features = [out.hidden[torch.tensor(parents)]]
            step = Plan(plan.number, tuple(self._make_level_row(line, nodes) for line, nodes in level))
            at = range(step.num_tokens)
            out = self._run(step, [line.device for line, _ in level], at, features, "go ahead")
        branches.finish(lines, min_chance)

    def _make_level_row(self, line: Line, nodes: Sequence[int]) -> Row:
        """Make a row of new nodes of a line's tree; those before them have been computed."""
        start = line.length - self.net.shift + len(line.computed)
        line.computed += nodes
        index = {-1: -1} | {node: i for i, node in enumerate(line.computed)}
        draft = tuple(Draft(line.drafts[node].token, index[line.drafts[node].parent]) for node in line.computed)
        return Row(line.row.row, start, len(nodes), Output.SAMPLE, draft=draft)

    def _make_ahead_row(self, line: Line) -> Row:
        token = line.drafts[-1].token
        if not self.net.shift:
            line.own.ahead.append(token)
        start = line.length + len(line.drafts) - 1 - self.net.shift
        return Row(line.row.row, start, 1, Output.SAMPLE, draft=(Draft(token, -1),))
