"""Suspects: parts of requests that were running when their engine died, tried again in ever smaller groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.server.engines.in_flight import RequestPart

SUSPECT_DEATHS = 2
SOLID_TOKENS = 8  # of progress that clear a part
MAX_STRIKES = 3
MAX_TRIALS_LOST = 12  # for parts that progress a little each time
QUIET_S = 1.0  # an engine must survive before a trial: the control of the experiment
TRIAL_S = 5.0  # first inconclusive trial; each further one lasts twice as long


class Quarantine:
    """Suspects, and parts on trial."""

    def __init__(self) -> None:
        self._suspects: deque[RequestPart] = deque()  # waiting
        self._tried: dict[RequestPart, float] = {}  # in the engine, with the end of their trial
        self._next_trial_s = 0.0

    def __len__(self) -> int:
        return len(self._suspects)

    def __iter__(self) -> Iterator[RequestPart]:
        return iter(list(self._suspects))

    def __contains__(self, part: RequestPart) -> bool:
        return part in self._tried

    @property
    def has_trials(self) -> bool:
        return bool(self._tried)

    def open(self, now: float) -> None:
        """Start over with a new engine."""
        self._next_trial_s = now + QUIET_S

    def next_group(self, now: float) -> list[RequestPart]:
        if self._tried or not self._suspects or now < self._next_trial_s:
            return []
        group: list[RequestPart] = []
        limit = len(self._suspects)
        while self._suspects and len(group) < (limit := min(limit, self._suspects[0].max_group)):
            group.append(self._suspects.popleft())
        for part in group:
            part.trial_s = part.trial_s or TRIAL_S
            self._tried[part] = now + part.trial_s
        return group

    def clear_after_progress(self, part: RequestPart) -> None:
        """End the trial of a part that has made progress, and its suspicion."""
        if part in self._tried and part.num_tokens >= SOLID_TOKENS:
            self._tried.pop(part)
            _clear(part)
            part.trial_s = 0.0

    def expire(self, now: float) -> None:
        """End inconclusive trials; called only while the engine makes steps."""
        for part in [part for part, end in self._tried.items() if now > end]:
            self._tried.pop(part)
            _clear(part)
            part.num_deaths = SUSPECT_DEATHS - 1
            part.trial_s *= 2

    def drop(self, part: RequestPart) -> None:
        if self._tried.pop(part, None) is None and part in self._suspects:
            self._suspects.remove(part)

    def handle_death(self, lost: Iterable[RequestPart], was_ready: bool) -> tuple[list[RequestPart], list[RequestPart]]:
        """Judge the parts of a dead engine; return those to resend and those to fail."""
        tried, self._tried = list(self._tried), {}
        others = [part for part in lost if part not in set(tried)]
        if tried:
            return others, self._blame(tried)
        if was_ready:
            for part in self._suspects:
                part.num_strikes = part.num_trials_lost = 0
        for part in others:
            part.num_deaths = 1 if part.num_tokens >= SOLID_TOKENS else part.num_deaths + 1
        suspects = [part for part in others if part.num_deaths >= SUSPECT_DEATHS]
        for part in suspects:
            part.max_group = max(1, (len(suspects) + 1) // 2)
        self._suspects.extend(suspects)
        return [part for part in others if part.num_deaths < SUSPECT_DEATHS], []

    def _blame(self, tried: list[RequestPart]) -> list[RequestPart]:
        for part in tried:
            part.max_group = max(1, len(tried) // 2)
        if len(tried) == 1:
            part = tried[0]
            part.num_trials_lost += 1
            part.num_strikes = 0 if part.num_tokens else part.num_strikes + 1
            if part.num_strikes >= MAX_STRIKES or part.num_trials_lost >= MAX_TRIALS_LOST:
                return [part]
        self._suspects.extend(tried)
        return []


def _clear(part: RequestPart) -> None:
    part.num_deaths = part.num_strikes = part.num_trials_lost = 0
    part.max_group = 1 << 30
