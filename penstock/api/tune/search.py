"""The search: one setting after the other, each value against the best so far, the winner against the start again."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, stdev
from typing import Any

from penstock.errors import InvalidConfig, quote

Options = dict[str, Any]
MIN_GAIN = 0.02  # smaller ones are not worth a flag, whatever the noise
CONFIRMATIONS = 3  # runs of start and winner, in turn


@dataclass(frozen=True)
class Run:
    """One run of the workload."""

    tokens_s: float
    ttft_ms: float  # of nine requests in ten
    tpot_ms: float


@dataclass(frozen=True)
class Aim:
    """Throughput, or throughput within limits: first keep the limits, then be fast."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def score(self, run: Run) -> float:
        """Return a number that grows with what is wanted. While a limit is broken it is under 1."""
        over = max(
            run.ttft_ms / self.ttft_ms if self.ttft_ms else 0.0, run.tpot_ms / self.tpot_ms if self.tpot_ms else 0.0
        )
        return 1.0 / over if over > 1.0 else 1.0 + run.tokens_s


def parse_aim(text: str) -> Aim:
    """Parse `throughput`, or limits in milliseconds such as `ttft=200,tpot=30`."""
    if text == "throughput":
        return Aim()
    limits: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(ttft|tpot)=(\d+(?:\.\d+)?)", part.strip())
        if match is None or match[1] in limits or not 0 < float(match[2]) < 1e9:
            raise InvalidConfig(
                f"--aim {quote(text)} is not understood: give throughput, or limits in ms like ttft=200,tpot=30"
            )
        limits[match[1]] = float(match[2])
    return Aim(limits.get("ttft"), limits.get("tpot"))


@dataclass(frozen=True)
class Trial:
    """The runs of some options, and their scores."""

    options: Options
    runs: tuple[Run, ...]
    scores: tuple[float, ...]

    @property
    def score(self) -> float:
        return median(self.scores)

    @property
    def noise(self) -> float:
        """Return the relative spread of the median."""
        if len(self.scores) < 2:
            return 1.0
        return float(stdev(self.scores) / max(self.score, 1e-9) * 1.25 / math.sqrt(len(self.scores)))


def find_gain(trial: Trial, base: Trial) -> tuple[float, float]:
    """Return the relative gain, and the noise of it: two standard errors of the difference of medians."""
    return trial.score / max(base.score, 1e-9) - 1.0, 2.0 * math.hypot(trial.noise, base.noise)


def is_better(trial: Trial, base: Trial) -> bool:
    gain, noise = find_gain(trial, base)
    return gain > max(noise, MIN_GAIN)


@dataclass
class Search:
    """A search, with its best so far. `measure` runs the workload once under some options, or raises InvalidConfig."""

    measure: Callable[[Options], Run]
    aim: Aim
    knobs: Mapping[str, Sequence[Any]]
    max_trials: int
    repeats: int = 3
    tell: Callable[[Trial, bool], None] = lambda trial, is_best: None
    start: Trial | None = None
    best: Trial | None = None
    num_trials: int = 0
    is_confirmed: bool = field(default=False)

    def run(self, options: Options) -> None:
        """Search from `options`. An interrupt leaves what was found."""
        self.start = self.best = self._try(options)
        for changed in self._candidates():
            if self.num_trials >= self.max_trials:
                break
            try:
                trial = self._try(changed)
            except InvalidConfig:
                continue  # it does not combine, or has no room
            is_best = is_better(trial, self.best)
            self.tell(trial, is_best)
            if is_best:
                self.best = trial
        if self.best is not self.start:
            self._confirm()

    def _candidates(self) -> Iterator[Options]:
        for name, values in self.knobs.items():
            for value in values:
                assert self.best is not None
                if self.best.options.get(name) != value:
                    yield {**self.best.options, name: value}

    def _try(self, options: Options) -> Trial:
        self.num_trials += 1
        runs = tuple(self.measure(options) for _ in range(self.repeats))
        return Trial(options, runs, tuple(map(self.aim.score, runs)))

    def _confirm(self) -> None:
        """Run start and winner in turn, so that what else the machine does hits both; go back if nothing is left."""
        assert self.start is not None and self.best is not None
        pairs = [[self.measure(one.options) for one in (self.start, self.best)] for _ in range(CONFIRMATIONS)]
        first, second = zip(*pairs)
        self.start, self.best = (
            Trial(one.options, tuple(runs), tuple(map(self.aim.score, runs)))
            for one, runs in ((self.start, first), (self.best, second))
        )
        self.is_confirmed = True

    @property
    def is_gain(self) -> bool:
        """True if the best options were confirmed to be better by more than the noise."""
        if self.start is None or self.best is None or self.best.options == self.start.options:
            return False
        return is_better(self.best, self.start)
