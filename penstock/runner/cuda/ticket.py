"""A started plan: what is still on its way back from the device."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from penstock.engine.plan import Result, Row, RowResult
from penstock.ops.sample import BAD
from penstock.runner.cuda.rows import RowTensors
from penstock.runner.rows import DeviceRow
from penstock.runner.sampling import take
from penstock.sampling.likeliest import DAMAGED
from penstock.sampling.sampler import Sampler


@dataclass
class Asked:
    """A row whose token the host chooses, from some of the step's logits."""

    row: Row
    result: RowResult
    device: DeviceRow
    first: int


@dataclass
class Ticket:
    number: int
    results: list[RowResult]
    rows: RowTensors
    sampler: Sampler
    tokens: torch.Tensor | None = None          # pinned; there once `done` has happened
    done: torch.cuda.Event | None = None
    chosen: list[tuple[RowResult, DeviceRow, int]] = field(default_factory=list)   # and its place among the tokens
    asked: list[Asked] = field(default_factory=list)
    logits: torch.Tensor | None = None          # [M, V], for those asked
    waited_s: float = 0.0
    error: str | None = None

    def settle(self) -> None:
        """Choose what the host chooses: the next plan may read it. What fails is this plan's failure."""
        asked, self.asked = self.asked, []
        if not asked or self.logits is None:
            return
        try:
            self._choose(asked, self.logits)
        except Exception as error:      # whatever a step raises must reach the scheduler, which finds the cause
            self.error = f"{type(error).__name__}: {error}"
        self.logits = None

    def _choose(self, asked: list[Asked], logits: torch.Tensor) -> None:
        places = [place for one in asked for place in range(one.first, one.first + 1 + len(one.row.draft))]
        values = logits[places].float().cpu().numpy()
        first = 0
        rows, tokens = [], []
        for one in asked:
            last = first + 1 + len(one.row.draft)
            state = one.device.state
            take(state, self.sampler.verify(values[first:last], state, one.row.draft), one.result)
            first = last
            if one.result.tokens:
                rows.append(one.row.row)
                tokens.append(one.result.tokens[-1])
        self.rows.take(rows, tokens)

    def result(self) -> Result:
        with torch.inference_mode():
            self.settle()
        if self.error is not None:
            return Result(self.number, error=self.error)
        try:
            waiting = time.perf_counter()
            if self.done is not None:
                self.done.synchronize()
            self.waited_s = time.perf_counter() - waiting
            if self.tokens is not None:
                tokens = self.tokens.tolist()
                for result, device, place in self.chosen:
                    token = tokens[place]
                    if token == BAD:
                        result.error = result.error or DAMAGED
                    elif not result.error:
                        result.tokens = (token,)
                        device.state.tokens.append(token)      # nothing else of it changes where the device chooses
        except Exception as error:      # whatever a step raises must reach the scheduler, which finds the cause
            return Result(self.number, error=f"{type(error).__name__}: {error}")
        return Result(self.number, self.results, forward_s=self.waited_s)
