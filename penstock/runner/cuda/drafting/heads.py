"""Medusa heads on a GPU: several tokens at once, from the hidden state that gave a row its last one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from penstock.draft.net.net import DraftHeads
from penstock.engine.plan import Output, Plan, RowResult
from penstock.runner.cpu.draft_lines import Line, LineDrafter, NetRow
from penstock.runner.cuda.decode_graphs import SampledTokens, bucket_sizes
from penstock.runner.cuda.drafting.features import Features, KeptStep
from penstock.runner.cuda.drafting.lines import DrawnTokens, count_lines, find_line_chooser
from penstock.runner.cuda.drafting.net_steps import TokenMap, draw_drafts
from penstock.runner.cuda.graphs import GraphPool, Half
from penstock.runner.cuda.runner import CudaRunner
from penstock.runner.cuda.staging import to_device
from penstock.runner.rows import RunningRow
from penstock.sampling.row import Chooser


class CudaHeadsDrafter(LineDrafter):
    """Runs heads that draft several tokens at once."""

    def __init__(
        self, runner: CudaRunner, heads: DraftHeads, max_ahead: int, max_num_batched_tokens: int, dtype: torch.dtype
    ) -> None:
        super().__init__(runner, heads.name, heads.target_ids)
        self.heads = heads
        self._target, target = runner.decode_steps, runner.decode_steps
        rows, width, device = target.rows, runner.model.spec.width, target.rows.last.device
        num_lines = count_lines(target.sizes[-1])
        self._num_heads = min(heads.num_heads, max_ahead)
        self._sizes = bucket_sizes(num_lines)
        self._pool = GraphPool(target.pool.eager, num_lines)
        with torch.inference_mode():
            self._map = TokenMap(heads.target_ids, runner.model.spec.vocab_size, device)
            num_tokens = max(max_num_batched_tokens, target.sizes[-1])
            self.features: Features | None = Features((), True, num_tokens, width, dtype, device)
            self._hidden = torch.zeros(num_lines, width, dtype=dtype, device=device)
            self._numbers = torch.full((2, num_lines), rows.padding_row, dtype=torch.int32, device=device)
            self._drawn = DrawnTokens(self._num_heads, num_lines, device)
        self._drawn_rows = rows.copy_for_drafts(False)
        self._known: dict[tuple[int, Chooser], Half[tuple[SampledTokens, ...]]] = {}
        self._waiting = self._list_captures()

    def _list_captures(self) -> list[Callable[[], Any]]:
        if self._pool.eager:
            return []
        first = find_line_chooser((), self._target.deterministic)
        choosers = [first] if first is Chooser.DEVICE_FILTERED else [Chooser.DEVICE_FILTERED, first]
        return [partial(self._run, size, chooser) for chooser in choosers for size in self._sizes for _ in range(2)]

    def prepare(self) -> bool:
        if self._waiting:
            self._waiting.pop()()
        return bool(self._waiting)

    def warm(self) -> None:
        self._run(self._sizes[0], find_line_chooser((), self._target.deterministic))

    def forget(self) -> None:
        self._waiting = []
        self._known.clear()
        self._pool.forget()

    def follow(self, plan: Plan, rows: Sequence[RunningRow]) -> None:
        for device in rows:
            if device.net is None:
                device.net = NetRow()

    def fill(
        self, plan: Plan, rows: Sequence[RunningRow], computed: Any, results: Sequence[RowResult], lines: list[Line]
    ) -> None:
        assert isinstance(computed, KeptStep)
        if not plan.ahead:
            return
        at: list[int] = []
        for row, device, result, first in zip(plan.rows, rows, results, computed.firsts):
            if (
                row.output is not Output.SAMPLE
                or not device.state.can_verify_on_device
                or len(lines) == len(self._hidden)
            ):
                continue
            line = self.lines.begin(row, device, device.net, result, min(plan.ahead, self._num_heads), plan.draft_price)
            if line is not None:
                lines.append(line)
                at.append(first + len(result.tokens) - 1)
        if not lines:
            return
        count, device_at = len(lines), to_device(at, self._hidden.device)
        size = next(size for size in self._sizes if size >= count)
        numbers = np.full((2, size), self._drawn_rows.padding_row, dtype=np.int32)
        numbers[:, :count] = [line.row.row for line in lines], [line.length for line in lines]
        self._numbers[:, :size].copy_(to_device(numbers, self._hidden.device))
        self._hidden[:count].copy_(computed.features[0][device_at])
        for place, drawn in enumerate(self._run(size, find_line_chooser(lines, self._target.deterministic))):
            self._drawn.keep(place, drawn, count)
        self._drawn.add_to(lines, self.lines, plan.min_chance or 0.0)

    def _run(self, size: int, chooser: Chooser) -> tuple[SampledTokens, ...]:
        """Draw the tokens of all heads for the first `size` lines."""
        if (size, chooser) not in self._known:
            self._known[size, chooser] = Half(partial(self._draw, size, chooser))
        return self._pool.run(self._known[size, chooser])

    def _draw(self, size: int, chooser: Chooser) -> tuple[SampledTokens, ...]:
        rows, lengths = self._numbers[:, :size]
        drawn = []
        for place in range(self._num_heads):
            logits = self._map.widen(self.heads.logits(self._hidden[:size], place))
            drawn.append(draw_drafts(self._target.model.ops, self._drawn_rows, logits, lengths + place, rows, chooser))
        return tuple(drawn)
