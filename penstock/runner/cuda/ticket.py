"""A started plan, and what it still waits for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from penstock.draft.grammar import GrammarDrafter
from penstock.engine.plan import Result, Row, RowResult
from penstock.runner.cuda.decode_batch import DecodeBatch, Report, describe_failure
from penstock.runner.cuda.drafting.features import KeptStep
from penstock.runner.cuda.rows import RowTensors
from penstock.runner.rows import RunningRow, add_sampled
from penstock.sampling.sampler import Sampled, Sampler


@dataclass
class HostRow:
    """A row that the host samples, from the logits [first, first + 1 + drafts)."""

    row: Row
    result: RowResult
    device: RunningRow
    first: int


@dataclass
class DraftRow:
    """A row whose draft is verified by the tokens that the device samples, from `first` on."""

    row: Row
    result: RowResult
    device: RunningRow
    first: int

    def verify(self, tokens: Sequence[int], report: Report | None) -> None:
        """Take the tokens as far as the draft has them, and one more."""
        state, draft, taken = self.device.state, self.row.draft, []
        for place, token in enumerate(tokens[self.first : self.first + 1 + len(draft)]):
            if token < 0:
                break  # after accepted tokens the next step meets it again
            taken.append(token)
            if token in state.stops or place < len(draft) and draft[place].token != token:
                break
        if not taken:
            failure = describe_failure(tokens[self.first], state)
            self.result.error, self.result.unfit = failure.error, failure.unfit
            return
        self.result.tokens = tuple(taken)
        count = state.num_logprobs
        if count is not None and report is not None:
            self.result.logprobs = tuple(
                report.read(self.first + place, token, count) for place, token in enumerate(taken)
            )
        state.tokens += taken
        self.device.watch(self.row, tokens[self.first : self.first + 1 + len(draft)], self.result)


@dataclass(frozen=True)
class Proposals:
    """Asks the drafters of a step's rows for their next lines."""

    rows: Sequence[RunningRow]
    max_tokens: int
    min_chance: float
    deterministic: bool = False

    def add(self, results: Sequence[RowResult | int]) -> list[RowResult | int]:
        """Return the results with drafts: of rows that the device can verify, and text that a grammar forces. The host
        verifies that, whose last bits may be others."""
        found = list(results)
        for place, (device, result) in enumerate(zip(self.rows, results)):
            is_forced = not device.state.can_verify_on_device
            if device.drafts is None or is_forced and (device.state.guide is None or self.deterministic):
                continue
            whole = RowResult((result,)) if isinstance(result, int) else result
            device.propose(whole, self.max_tokens, self.min_chance)
            if is_forced and whole.draft and whole.draft[0].drafter != GrammarDrafter.name:
                whole.draft = ()
            if whole.draft:
                found[place] = whole
        return found


@dataclass
class StepTicket:
    """A started plan, and what it still waits for."""

    number: int
    rows: RowTensors
    sampler: Sampler
    results: Sequence[RowResult | int] = ()
    batch: DecodeBatch | None = None  # of steady rows only: their results are their tokens and log probabilities
    places: Sequence[int] = ()  # of the plan's rows in that batch
    tokens: torch.Tensor | None = None  # pinned; valid after `done`
    report: torch.Tensor | None = None  # likewise, if any row wants log probabilities
    max_logprobs: int = 0  # tokens that a row of it lists
    mus: torch.Tensor | None = None  # likewise, if any row has mirostat
    begun: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None
    device_rows: list[tuple[RowResult, RunningRow, int]] = field(default_factory=list)  # and the place of its token
    draft_rows: list[DraftRow] = field(default_factory=list)
    proposals: Proposals | None = None
    kept: KeptStep | None = None  # for a drafting model
    idle_s: float = 0.0
    end_s: float = 0.0  # when its result was read, by the host's clock
    host_rows: list[HostRow] = field(default_factory=list)
    logits: torch.Tensor | None = None  # [M, V], for the host rows
    waited_s: float = 0.0
    step_s: float = 0.0
    error: str | None = None
    lost: bool = False  # a block to be loaded was
    arrived: bool = False
    verifying: frozenset[int] = frozenset()  # rows whose drafts this plan verifies
    ended: bool = False  # its result has been read

    def settle(self) -> None:
        """Sample the host rows, whose tokens the next plan may read. What fails is this plan's failure."""
        host_rows, self.host_rows = self.host_rows, []
        if not host_rows or self.logits is None:
            return
        try:
            self._sample(host_rows, self.logits)
        except Exception as error:  # whatever a step raises must reach the scheduler, which finds the cause
            self.error = f"{type(error).__name__}: {error}"
        self.logits = None

    def _sample(self, host_rows: list[HostRow], logits: torch.Tensor) -> None:
        places = [place for one in host_rows for place in range(one.first, one.first + 1 + len(one.row.draft))]
        values = logits[places].float().cpu().numpy()
        first = 0
        rows, tokens = [], []
        for one in host_rows:
            last = first + 1 + len(one.row.draft)
            state = one.device.state
            add_sampled(state, self.sampler.verify(values[first:last], state, one.row.draft), one.result)
            first = last
            if one.result.tokens:
                rows.append(one.row.row)
                tokens.append(one.result.tokens[-1])
        self.rows.set_last(rows, tokens)

    def arrive(self) -> None:
        """Wait for the tokens that the device sampled and append them. What fails is this plan's failure."""
        if self.arrived or self.error is not None:
            return
        self.arrived = True
        try:
            waiting = time.perf_counter()
            if self.begun is not None and self.done is not None:
                self.done.synchronize()
                self.step_s = self.begun.elapsed_time(self.done) / 1e3
            self.waited_s = time.perf_counter() - waiting
            if self.tokens is not None:
                tokens = self.tokens.tolist()
                report = None if self.report is None else Report(self.report, self.max_logprobs)
                if self.batch is not None:
                    self.results = self.batch.append(tokens, self.places, report)
                for result, device, place in self.device_rows:
                    self._append(result, device, tokens[place], place, report)
                for one in self.draft_rows:
                    one.verify(tokens, report)
        except Exception as error:  # whatever a step raises must reach the scheduler, which finds the cause
            self.error = f"{type(error).__name__}: {error}"

    def _append(self, result: RowResult, device: RunningRow, token: int, place: int, report: Report | None) -> None:
        state = device.state
        if token < 0:
            failure = describe_failure(token, state)
            if not result.error:
                result.error, result.unfit = failure.error, failure.unfit
            return
        count = state.num_logprobs
        logprobs = None if count is None or report is None else report.read(place, token, count)
        if state.is_steady:
            if not result.error:
                result.tokens, result.logprobs = (token,), () if logprobs is None else (logprobs,)
                state.tokens.append(token)  # nothing else of it changes
        else:
            mu = float(self.mus[place]) if state.samplers.mu is not None and self.mus is not None else None
            add_sampled(state, [Sampled(token, logprobs, mu=mu)], result)

    def result(self) -> Result:
        with torch.inference_mode():
            self.settle()
        self.arrive()
        self.ended, self.end_s = True, time.perf_counter()
        if self.error is not None or self.lost:
            return Result(self.number, error=self.error, lost=self.lost)
        results, draft_s = self.results if self.proposals is None else self.proposals.add(self.results), 0.0
        if self.kept is not None:
            results, draft_s = self.kept.add(results)
            self.end_s = time.perf_counter()
        return Result(
            self.number, results, forward_s=self.waited_s, step_s=self.step_s, idle_s=self.idle_s, draft_s=draft_s
        )
