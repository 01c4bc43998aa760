"""A model on a GPU that drafts one token after the other: it catches up with a step's tokens, then goes ahead.

What its blocks hold decides how fast an answer comes, and nothing else: every draft token is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from penstock.draft.net.net import DraftNet
from penstock.engine.plan import Output, Plan, Row, RowResult
from penstock.ops.attention.inputs import POSITION, ROW
from penstock.runner.cpu.draft_lines import Line
from penstock.runner.cpu.drafting import FedRow, FollowingDrafter, find_features
from penstock.runner.cuda.drafting.features import Features, KeptStep
from penstock.runner.cuda.drafting.lines import DrawnTokens, count_lines, find_line_chooser
from penstock.runner.cuda.drafting.net_steps import NetModel, NetSteps
from penstock.runner.cuda.mixed_graphs import MixedGraphs
from penstock.runner.cuda.packed import PackedRows, max_numbers
from penstock.runner.cuda.runner import CudaRunner
from penstock.runner.cuda.staging import Staging, to_device
from penstock.runner.rows import RunningRow
from penstock.sampling.row import Chooser

MAX_CATCH_UP = 2048  # tokens of all rows in one step
CAPTURED_CATCH_UP = 256  # tokens, up to which such steps are captured


class CudaNetDrafter(FollowingDrafter):
    """Runs a model that drafts one token after the other."""

    def __init__(
        self, runner: CudaRunner, net: DraftNet, max_ahead: int, max_num_batched_tokens: int, dtype: torch.dtype
    ) -> None:
        super().__init__(runner, net)
        target = runner.decode_steps
        self._rows = runner.rows
        self._num_lines = count_lines(target.sizes[-1])
        self._max_tokens = max(max_num_batched_tokens, target.sizes[-1])
        first, device = runner.model.spec.num_layers, target.rows.last.device
        caches = target.caches
        if not net.is_target:
            caches = runner.memory.views([*runner.model.spec.memories(), *net.memories()])[first:]
        with torch.inference_mode():
            self._model = NetModel(net, target, self._num_lines, dtype)
            groups = [g for g, _ in self._drafting]
            self._steps = NetSteps(self._model, target, caches, groups, self._num_lines)
            self._mixed = MixedGraphs(self._steps, self._num_lines, min(self._max_tokens, CAPTURED_CATCH_UP))
            self._drawn = DrawnTokens(max_ahead, self._num_lines, device)
            self.features: Features | None = None
            if net.shift:
                self._model.make_room(self._max_tokens)
                self.features = Features(net.taps, False, self._max_tokens, runner.model.spec.width, dtype, device)
            tokens = max(self._max_tokens, MAX_CATCH_UP)
            room = max_numbers(tokens, max(self._num_lines, target.sizes[-1]), self._rows.num_groups)
            self._staging = Staging(max(room, max_ahead * self._steps.num_flat(self._num_lines, False)), device)
        self._waiting = self._list_captures()

    def _list_captures(self) -> list[Callable[[], None]]:
        """List what is to be captured, the most wanted last: the largest first of all, into whose memory others fit."""
        if self._steps.pool.eager:
            return []
        first = Chooser.DEVICE_FILTERED if self._steps.deterministic else Chooser.DEVICE
        choosers = [first] if first is Chooser.DEVICE_FILTERED else [first, Chooser.DEVICE_FILTERED]
        found: list[Callable[[], None]] = []
        for chooser in choosers:
            found += [partial(self._steps.prepare, key, chooser) for key in self._steps.buckets()]
            found += [partial(self._mixed.prepare, key, chooser) for key in self._mixed.buckets()]
        return found[::-1]

    def prepare(self) -> bool:
        if self._waiting:
            self._steps.pool.has_idle_moments = True
            self._waiting.pop()()
        return bool(self._waiting)

    def warm(self) -> None:
        chooser = find_line_chooser((), self._steps.deterministic)
        for size in {self._steps.sizes[0], self._steps.sizes[-1]}:
            self._steps.warm(size, chooser=chooser)
        if self._mixed.tokens:
            self._mixed.warm(self._mixed.buckets()[-1], chooser)

    def forget(self) -> None:
        self._waiting = []
        self._steps.forget()
        self._mixed.forget()

    def fill(
        self, plan: Plan, rows: Sequence[RunningRow], computed: Any, results: Sequence[RowResult], lines: list[Line]
    ) -> None:
        """Catch up, then go ahead, unless a plan is under way already that would make the drafts stale. A model with
        features does the first in every step: later they are gone."""
        assert isinstance(computed, KeptStep)
        if computed.number != self._rows.num_plans:
            plan = replace(plan, ahead=0)
        if not plan.ahead and not self.net.shift:
            return
        fed = self._plan_rows(plan, rows, results, lines, MAX_CATCH_UP)
        fed = self._put_in_order(plan, fed, computed.firsts)
        if not fed:
            return
        lines[:] = [line for _, _, line, _ in fed if line is not None]
        self._fill_features(plan, fed, computed.features)
        chooser = find_line_chooser(lines, self._steps.deterministic)
        self._catch_up([row for row, _, _, _ in fed], [device for _, device, _, _ in fed], chooser)
        for row, device, _, _ in fed:
            self._blocks.mark(device, row.start + row.count)
        if lines:
            self._go_ahead(lines, chooser)
            tokens = self._drawn.add_to(lines, self.lines, plan.min_chance or 0.0)
            for line, drawn in zip(lines, tokens):
                line.own.ahead = [] if self.net.shift else drawn[: line.most - 1]

    def _put_in_order(self, plan: Plan, fed: Sequence[FedRow], firsts: Sequence[int]) -> list[FedRow]:
        """Return the rows whose blocks are on the device, those of one token first, with their tokens' places in the
        target's step. Lines beyond the most are left out."""
        places = {row.row: first for row, first in zip(plan.rows, firsts)}
        found: list[FedRow] = []
        num_lines = 0
        for row, device, line, _ in fed:
            if self._rows[row.row] is not device:
                continue
            num_lines += line is not None
            if num_lines > self._num_lines:
                row, line = replace(row, output=Output.NONE), None
            found.append((row, device, line, places[row.row]))
        return sorted(found, key=lambda one: one[0].count != 1)

    def _begin_line(self, plan: Plan, row: Row, device: RunningRow, result: RowResult, until: int) -> Line | None:
        if not device.state.can_verify_on_device:
            return None
        return super()._begin_line(plan, row, device, result, until)

    def _fill_features(self, plan: Plan, fed: Sequence[FedRow], features: Sequence[torch.Tensor]) -> None:
        """Put the target's features of the tokens to be computed in their places."""
        if not self.net.shift:
            return
        indices = find_features(plan, fed)
        at = to_device(indices, self._steps.rows.last.device)
        for to, values in zip(self._model.given, features):
            to[: len(indices)].copy_(values[at])

    def _catch_up(self, rows: Sequence[Row], devices: Sequence[RunningRow], chooser: Chooser) -> None:
        """Compute positions of rows, and draw the first token of each line."""
        steps, mixed = self._steps, self._mixed
        packed = PackedRows(rows, devices, steps.tile_tokens, self.net.shift)
        count = len(packed.at)
        key = mixed.pick(packed.num_tokens, max(len(rows), count))
        if key is not None:
            one = mixed.send(self._staging, packed, key)
            steps.pool.run(one.forward)
            if count:
                self._drawn.keep(0, steps.pool.run(one.sample[chooser]), count)
            return
        inputs = mixed.send_alone(self._staging, packed)
        lengths = inputs.add_ends(1)
        hidden = steps.compute(inputs.step)
        if count:
            logits = steps.model.logits(hidden)
            self._drawn.keep(0, steps.sample(logits, lengths, inputs.rows, chooser), count)

    def _go_ahead(self, lines: Sequence[Line], chooser: Chooser) -> None:
        """Compute the tokens drawn, one after the other, and draw those after them. The host waits for none."""
        steps, count = self._steps, len(lines)
        most = np.array([line.most for line in lines])
        num_places = int(most.max()) - 1
        if num_places <= 0:
            return
        lengths = np.array([line.length for line in lines])
        key = steps.pick(count, False, int((lengths + most).max()))
        one, size = steps[key], key[0]
        width = steps.num_flat(size, False)
        flat = self._staging.take()[: num_places * width].reshape(num_places, width)
        flat[:] = -1
        for place in range(num_places):
            numbers = steps.split(flat[place], size)[0]
            numbers[ROW, :count], numbers[ROW, count:] = [line.row.row for line in lines], steps.rows.padding_row
            position = lengths - self.net.shift + place
            numbers[POSITION, :count] = np.where(place < most - 1, position, -1)
        sent = self._staging.send(num_places * width).view(num_places, width)
        for place in range(num_places):
            one.flat.copy_(sent[place])
            steps.pool.run(one.forward)
            self._drawn.keep(place + 1, steps.pool.run(one.sample[chooser]), count)
