"""Finding the request that ends engines, without stopping the others.

A part that was in two engines which died, and came no further between, is a suspect. Whoever is not goes on at once.
Suspects join a running engine a few at a time: those that come further are cleared, and where the engine dies, only
those on trial are blamed, and tried again in half the number. A part that dies alone, before its first token, several
times one after another ends with an error. An engine that dies while nobody is on trial shows another cause and clears
all records, so that kills from outside condemn nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from penstock.server.flight import Part

SUSPECT_DEATHS = 2
SOLID_TOKENS = 8  # of progress after which a part is no suspect
MAX_STRIKES = 3
MAX_TRIALS_LOST = 12  # for parts that come a little further each time
QUIET_S = 1.0  # for which an engine must have lived before a trial: the control of the experiment
TRIAL_S = 5.0  # the first that shows nothing; each further one lasts twice as long


class Trials:
    def __init__(self) -> None:
        self._suspects: deque[Part] = deque()  # not in the engine
        self._tried: dict[Part, float] = {}  # in the engine, and when their trial ends by itself
        self._may_begin_s = 0.0

    def __len__(self) -> int:
        return len(self._suspects)

    def __iter__(self) -> Iterator[Part]:
        return iter(list(self._suspects))

    def __contains__(self, part: Part) -> bool:
        return part in self._tried

    def open(self, now: float) -> None:
        """A new engine is ready."""
        self._may_begin_s = now + QUIET_S

    def next_group(self, now: float) -> list[Part]:
        """Suspects to begin now."""
        if self._tried or not self._suspects or now < self._may_begin_s:
            return []
        group: list[Part] = []
        most = len(self._suspects)
        while self._suspects and len(group) < (most := min(most, self._suspects[0].max_group)):
            group.append(self._suspects.popleft())
        for part in group:
            part.trial_s = part.trial_s or TRIAL_S
            self._tried[part] = now + part.trial_s
        return group

    def note(self, part: Part) -> None:
        """Clear a part on trial that has come far enough."""
        if part in self._tried and part.num_tokens >= SOLID_TOKENS:
            self._tried.pop(part)
            _clear(part)
            part.trial_s = 0.0

    def expire(self, now: float) -> None:
        """End the trials that have shown nothing; called only while the engine makes steps."""
        for part in [part for part, end in self._tried.items() if now > end]:
            self._tried.pop(part)
            _clear(part)
            part.num_deaths = SUSPECT_DEATHS - 1
            part.trial_s *= 2

    def drop(self, part: Part) -> None:
        """Forget a part that has ended."""
        if self._tried.pop(part, None) is None and part in self._suspects:
            self._suspects.remove(part)

    def lose(self, lost: Iterable[Part], was_ready: bool) -> tuple[list[Part], list[Part]]:
        """The engine died with these parts: those that go on with the next one, and those to give up."""
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

    def _blame(self, tried: list[Part]) -> list[Part]:
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


def _clear(part: Part) -> None:
    part.num_deaths = part.num_strikes = part.num_trials_lost = 0
    part.max_group = 1 << 30
