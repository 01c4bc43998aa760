"""A started plan: what is still on its way back from the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from penstock.engine.plan import Result, Row, RowResult
from penstock.ops.report import NO_TOKEN as LIST_END
from penstock.ops.sample import BAD, NOTHING
from penstock.ops.wishes import MOST_LOGPROBS
from penstock.runner.cuda.lineup import Lineup
from penstock.runner.cuda.rows import RowTensors
from penstock.runner.rows import DeviceRow
from penstock.runner.sampling import take
from penstock.sampling.likeliest import DAMAGED
from penstock.sampling.sampler import NO_TOKEN, Sampled, Sampler, nothing_allowed
from penstock.types import Logprob, TokenLogprobs


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
    rows: RowTensors
    sampler: Sampler
    results: Sequence[RowResult | int] = ()
    line: Lineup | None = None  # whose rows are all simple: their results come with the tokens,
    places: Sequence[int] = ()  # where each of the plan's rows is there
    tokens: torch.Tensor | None = None  # pinned; there once `done` has happened
    report: torch.Tensor | None = None  # likewise, of the same rows, where any asks for log probabilities
    mus: torch.Tensor | None = None  # likewise, where any has mirostat
    done: torch.cuda.Event | None = None
    chosen: list[tuple[RowResult, DeviceRow, int]] = field(default_factory=list)  # and its place among the tokens
    asked: list[Asked] = field(default_factory=list)
    logits: torch.Tensor | None = None  # [M, V], for those asked
    waited_s: float = 0.0
    error: str | None = None
    arrived: bool = False

    def settle(self) -> None:
        """Choose what the host chooses: the next plan may read it. What fails is this plan's failure."""
        asked, self.asked = self.asked, []
        if not asked or self.logits is None:
            return
        try:
            self._choose(asked, self.logits)
        except Exception as error:  # whatever a step raises must reach the scheduler, which finds the cause
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

    def arrive(self) -> None:
        """Wait for what the device chose, and take it in; what fails is this plan's failure."""
        if self.arrived or self.error is not None:
            return
        self.arrived = True
        try:
            waiting = time.perf_counter()
            if self.done is not None:
                self.done.synchronize()
            self.waited_s = time.perf_counter() - waiting
            if self.tokens is not None:
                tokens = self.tokens.tolist()
                if self.line is not None:
                    self.results = self.line.take(tokens, self.places)
                for result, device, place in self.chosen:
                    self._take(result, device, tokens[place], place)
        except Exception as error:  # whatever a step raises must reach the scheduler, which finds the cause
            self.error = f"{type(error).__name__}: {error}"

    def _take(self, result: RowResult, device: DeviceRow, token: int, place: int) -> None:
        state = device.state
        if token == BAD:
            result.error = result.error or DAMAGED
        elif state.simple:
            if not result.error:
                result.tokens = (token,)
                state.tokens.append(token)  # nothing else of it changes
        elif token == NOTHING:
            take(state, [Sampled(NO_TOKEN, error=nothing_allowed(state), unfit=True)], result)
        else:
            told = None
            if state.num_logprobs is not None and self.report is not None:
                told = _told(token, self.report[place].tolist())
            mu = None
            if state.samplers.mu is not None and self.mus is not None:
                mu = float(self.mus[place])
            take(state, [Sampled(token, told, mu=mu)], result)

    def result(self) -> Result:
        with torch.inference_mode():
            self.settle()
        self.arrive()
        if self.error is not None:
            return Result(self.number, error=self.error)
        return Result(self.number, self.results, forward_s=self.waited_s)


def _told(token: int, line: list[float]) -> TokenLogprobs:
    """The chosen token first, then the likeliest, from a row of `ops.report`."""
    told = {token: Logprob(line[0], int(line[1]))}
    for place, (other, value) in enumerate(zip(line[2 : 2 + MOST_LOGPROBS], line[2 + MOST_LOGPROBS :]), start=1):
        if other == LIST_END:
            break
        told.setdefault(int(other), Logprob(value, place))
    return told
