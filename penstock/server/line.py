"""Those who wait: the prompts of one client request in a line, the lines of one tenant by priority and in turns."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.server.flight import Flight


class Line:
    """The prompts of one client request that wait."""

    def __init__(self, flights: Sequence[Flight]) -> None:
        self.flights: OrderedDict[Flight, None] = OrderedDict.fromkeys(flights)
        self.priority = flights[0].request.priority
        self.has_begun = False
        self._counted = 0, 0

    @property
    def first(self) -> Flight:
        return next(iter(self.flights))

    def put_first(self, flight: Flight) -> None:
        self.flights[flight] = None
        self.flights.move_to_end(flight, last=False)

    def recount(self) -> tuple[int, int]:
        """By how much it has changed whether this is a line that waits, and the tokens of its first prompt."""
        now = (1, len(self.first.request.tokens)) if self.flights else (0, 0)
        before, self._counted = self._counted, now
        return now[0] - before[0], now[1] - before[1]


class Tenant:
    """Every operation takes a time that does not depend on how many wait, or its logarithm."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_lines = 0
        self.num_flights = 0
        self.num_tokens = 0             # of the first prompt of every line
        self._levels: dict[int, OrderedDict[Line, None]] = {}
        self._priorities: list[int] = []            # a heap of all levels' keys, and some that are gone
        self._known: set[int] = set()               # what is in it
        self._fresh: OrderedDict[Line, None] = OrderedDict()     # of which nothing has begun

    def __iter__(self) -> Iterator[Flight]:
        for priority in sorted(self._levels):
            for line in self._levels[priority]:
                yield from line.flights

    def add(self, line: Line) -> None:
        """Behind the others of its priority; nothing changes for one that is there."""
        level = self._levels.get(line.priority)
        if level is None:
            level = self._levels[line.priority] = OrderedDict()
            if line.priority not in self._known:
                self._known.add(line.priority)
                heapq.heappush(self._priorities, line.priority)
        if line not in level:
            level[line] = None
            if not line.has_begun:
                self._fresh[line] = None

    @property
    def first(self) -> Line:
        """The line whose turn it is."""
        while self._priorities[0] not in self._levels:
            self._known.remove(heapq.heappop(self._priorities))
        return next(iter(self._levels[self._priorities[0]]))

    @property
    def newest(self) -> Line | None:
        """The line that came last, of those of which nothing has begun."""
        return next(reversed(self._fresh), None)

    def begin(self, line: Line) -> None:
        """Its first prompt goes; the next one waits until the other lines had their turns."""
        line.has_begun = True
        self._fresh.pop(line, None)
        self._levels[line.priority].move_to_end(line)

    def remove(self, line: Line) -> None:
        self._fresh.pop(line, None)
        level = self._levels[line.priority]
        del level[line]
        if not level:
            del self._levels[line.priority]
