"""Those who wait: the prompts of one client request in a line, the lines of one tenant by priority and in turns."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.server.order import PASSES, Order

if TYPE_CHECKING:
    from penstock.server.flight import Flight


class Line:
    """The prompts of one client request that wait."""

    def __init__(self, flights: Sequence[Flight]) -> None:
        self.flights: OrderedDict[Flight, None] = OrderedDict.fromkeys(flights)
        self.priority = flights[0].request.priority
        self.has_begun = False
        self.num_passed = 0  # times that a later one was taken before it
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


class Level:
    """The lines of one priority, in the order of their turns."""

    def __init__(self) -> None:
        self.lines: OrderedDict[Line, None] = OrderedDict()
        self.fresh: OrderedDict[Line, None] = OrderedDict()  # of which nothing has begun


class Tenant:
    """The lines of one tenant; taking the next does not depend on how many wait."""

    def __init__(self, name: str, order: Order) -> None:
        self.name = name
        self._order = order
        self.num_lines = 0
        self.num_flights = 0
        self.num_tokens = 0  # of the first prompt of every line
        self._levels: dict[int, Level] = {}
        self._priorities: list[int] = []  # a heap of all levels' keys, and some that are gone
        self._known: set[int] = set()  # what is in it

    def __iter__(self) -> Iterator[Flight]:
        for priority in sorted(self._levels):
            for line in self._levels[priority].lines:
                yield from line.flights

    def add(self, line: Line) -> None:
        """Behind the others of its priority; nothing changes for one that is there."""
        level = self._levels.get(line.priority)
        if level is None:
            level = self._levels[line.priority] = Level()
            if line.priority not in self._known:
                self._known.add(line.priority)
                heapq.heappush(self._priorities, line.priority)
        if line not in level.lines:
            level.lines[line] = None
            if not line.has_begun:
                level.fresh[line] = None

    @property
    def first(self) -> Line:
        """The line whose turn it is."""
        return self._order.first(self._best.lines)

    @property
    def oldest_fresh(self) -> Line | None:
        """The first line of which nothing has begun, if it has the best priority."""
        return next(iter(self._best.fresh), None)

    @property
    def newest_fresh(self) -> Line | None:
        """The last line of which nothing has begun, of the worst priority."""
        level = max((priority for priority, level in self._levels.items() if level.fresh), default=None)
        return None if level is None else next(reversed(self._levels[level].fresh))

    @property
    def _best(self) -> Level:
        while self._priorities[0] not in self._levels:
            self._known.remove(heapq.heappop(self._priorities))
        return self._levels[self._priorities[0]]

    def promote(self, line: Line) -> None:
        """Make it this line's turn."""
        line.num_passed = PASSES
        self._levels[line.priority].lines.move_to_end(line, last=False)

    def begin(self, line: Line) -> None:
        """Its first prompt goes; the next one waits until the other lines had their turns."""
        level = self._levels[line.priority]
        self._order.begin(line, level.lines)
        line.has_begun = True
        level.fresh.pop(line, None)
        level.lines.move_to_end(line)

    def remove(self, line: Line) -> None:
        level = self._levels[line.priority]
        level.fresh.pop(line, None)
        del level.lines[line]
        if not level.lines:
            del self._levels[line.priority]
