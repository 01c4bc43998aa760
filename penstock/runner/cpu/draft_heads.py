"""Medusa heads on a CPU: several tokens at once, from the hidden state that gave a row its last one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from penstock.draft.net.net import DraftHeads
from penstock.engine.plan import Output, Plan, RowResult
from penstock.ops import argmax
from penstock.runner.cpu.buffers import MAX_TAPED_TOKENS
from penstock.runner.cpu.draft_branches import BranchMaker
from penstock.runner.cpu.draft_lines import Line, LineDrafter, NetRow
from penstock.runner.cpu.runner import Runner, StepOutput, use_torch
from penstock.runner.cpu.tapes import Tapes
from penstock.runner.rows import RunningRow


class HeadsDrafter(LineDrafter):
    """Runs heads that draft several tokens at once, from the hidden state that gave the row its last token."""

    taps: tuple[int, ...] = ()
    reads_hidden = False

    def __init__(self, runner: Runner, heads: DraftHeads, tree: bool = False) -> None:
        super().__init__(runner, heads.name, heads.target_ids)
        self._branches = BranchMaker(self.lines) if tree else None
        self.heads = heads
        self.tapes: Tapes[StepOutput] = Tapes()
        self._hidden = torch.zeros(MAX_TAPED_TOKENS, runner.model.spec.width)

    def follow(self, plan: Plan, rows: Sequence[RunningRow]) -> None:
        for device in rows:
            if device.net is None:
                device.net = NetRow()

    def fill(
        self,
        plan: Plan,
        rows: Sequence[RunningRow],
        computed: StepOutput,
        results: Sequence[RowResult],
        lines: list[Line],
    ) -> None:
        if not plan.ahead:
            return
        at: list[int] = []
        wanted = sum(1 + len(row.draft) for row in plan.rows if row.output is Output.SAMPLE)
        is_cut = len(computed.hidden) == wanted and wanted != plan.num_tokens  # the wanted tokens' states alone
        end = 0
        for row, device, result in zip(plan.rows, rows, results):
            is_sample = row.output is Output.SAMPLE
            end += (1 + len(row.draft) if is_sample else 0) if is_cut else row.count
            assert isinstance(device.net, NetRow)
            ahead = plan.ahead if self._branches else min(plan.ahead, self.heads.num_heads)
            line = None
            if is_sample:
                line = self.lines.begin(row, device, device.net, result, ahead, plan.draft_price)
            if line is not None:
                lines.append(line)
                at.append(end - 1 - len(row.draft) + len(result.tokens) - 1)
        going, place = list(range(len(lines)))[:MAX_TAPED_TOKENS], 0
        if not going:
            return
        with use_torch():
            self._hidden[: len(going)] = computed.hidden[torch.tensor([at[i] for i in going])]
        min_chance = plan.min_chance or 0.0
        if self._branches is not None:
            self._branch_out(self._branches, [lines[i] for i in going], min_chance)
            return
        while going:
            out, likeliest = self._run(len(lines), place)
            going = [i for i in going if self.lines.extend(lines[i], out.values[i], likeliest[i], min_chance)]
            place += 1

    def _branch_out(self, branches: BranchMaker, lines: Sequence[Line], min_chance: float) -> None:
        """Grow trees: a head's logits are the same for all nodes of its level."""
        levels: list[list[int]] = [[-1] for _ in lines]
        for place in range(self.heads.num_heads):
            if not any(levels):
                break
            out, likeliest = self._run(len(lines), place)
            for i, line in enumerate(lines):
                since = len(line.drafts)
                for node in levels[i]:
                    branches.grow(line, node, out.values[i], likeliest[i])
                levels[i] = branches.choose(line, since, min_chance, line.most)
        branches.finish(lines, min_chance)

    def _run(self, num_lines: int, place: int) -> tuple[StepOutput, list[int]]:
        """Compute a head's logits, and the likeliest token of each line."""
        count = min(num_lines, MAX_TAPED_TOKENS)
        out = self.tapes.run((count, place), partial(self._forward, count, place))
        assert out.argmax is not None
        return out, out.argmax.tolist()

    def _forward(self, count: int, place: int) -> StepOutput:
        with use_torch():
            hidden = self._hidden[:count]
            logits = self.heads.logits(hidden, place)
            return StepOutput(hidden, logits, argmax(logits))
