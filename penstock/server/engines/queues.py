"""Queues: the prompts of a client request, and a tenant's requests by priority, --scheduling-policy and turn."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Protocol

from penstock.server.engines.prefixes import BLOCK_TOKENS, MIN_KNOWN_TOKENS, SentPrefixes

if TYPE_CHECKING:
    from penstock.server.engines.in_flight import InFlightRequest

MAX_PASSES = 16  # then a request cannot be overtaken
MAX_CANDIDATES = 128  # requests considered
MAX_FITTING = 32  # requests considered for the engines that have room


class Placement(Protocol):
    """Says which waiting requests engines would take now."""

    def fits(self, flight: InFlightRequest) -> bool:
        """True if the engine that is best for a request has room."""

    def find_movable(self, flights: Sequence[InFlightRequest], num_waiting: int) -> Sequence[int]:
        """Return which of the first of `num_waiting` requests, none of which fits, an engine should have."""


class QueueOrder(Protocol):
    """Chooses among the waiting requests of one priority."""

    def pick(self, queues: Iterable[PromptQueue]) -> PromptQueue:
        """Return the request to go next; `queues` are in turn order."""

    def record_start(self, queue: PromptQueue, queues: Iterable[PromptQueue]) -> None:
        """Record that the first prompt of `queue` is sent."""

    def reset(self, cache_tokens: int) -> None:
        """Forget the cache: a new engine starts empty."""


class FirstComeOrder:
    """First come, first served; requests with several prompts take turns."""

    def pick(self, queues: Iterable[PromptQueue]) -> PromptQueue:
        return next(iter(queues))

    def record_start(self, queue: PromptQueue, queues: Iterable[PromptQueue]) -> None:
        for other in islice(queues, MAX_CANDIDATES):
            if other is queue:
                break
            other.num_passed += 1
        queue.num_passed = 0

    def reset(self, cache_tokens: int) -> None:
        pass


class _CostOrder(FirstComeOrder):
    """Lowest cost first among the first few; a request can be overtaken only so often."""

    def pick(self, queues: Iterable[PromptQueue]) -> PromptQueue:
        near = list(islice(queues, MAX_CANDIDATES))
        overdue = next((queue for queue in near if queue.num_passed >= MAX_PASSES), None)
        return overdue or min(near, key=lambda queue: self.cost(queue.first))

    def cost(self, flight: InFlightRequest) -> int:
        raise NotImplementedError


class ShortestFirstOrder(_CostOrder):
    def cost(self, flight: InFlightRequest) -> int:
        return len(flight.request.tokens) + max(map(len, flight.outputs.values()), default=0)


class LongestPrefixOrder(_CostOrder):
    """Longest prefix that was lately sent to the engine first. The engine, which knows its cache, orders again."""

    def __init__(self) -> None:
        self._known = SentPrefixes()

    def reset(self, cache_tokens: int) -> None:
        self._known.reset(max(MIN_KNOWN_TOKENS, cache_tokens) // BLOCK_TOKENS)

    def record_start(self, queue: PromptQueue, queues: Iterable[PromptQueue]) -> None:
        super().record_start(queue, queues)
        self._known.add(queue.first.digests)

    def cost(self, flight: InFlightRequest) -> int:
        return -self._known.count(flight.digests)


ORDERS: dict[str, type[FirstComeOrder] | type[ShortestFirstOrder] | type[LongestPrefixOrder]] = {
    "fcfs": FirstComeOrder,
    "priority": FirstComeOrder,
    "sjf": ShortestFirstOrder,
    "lpm": LongestPrefixOrder,
}


def make_order(policy: str) -> QueueOrder:
    return ORDERS[policy]()


class PromptQueue:
    def __init__(self, flights: Sequence[InFlightRequest]) -> None:
        self.flights: OrderedDict[InFlightRequest, None] = OrderedDict.fromkeys(flights)
        self.priority = flights[0].request.priority
        self.has_begun = False
        self.num_passed = 0  # times it was overtaken
        self._last_counts = 0, 0

    @property
    def first(self) -> InFlightRequest:
        return next(iter(self.flights))

    def put_first(self, flight: InFlightRequest) -> None:
        self.flights[flight] = None
        self.flights.move_to_end(flight, last=False)

    def recount(self) -> tuple[int, int]:
        """Return the change since the last call: of 1 for a waiting queue, and of its first prompt's tokens."""
        now = (1, len(self.first.request.tokens)) if self.flights else (0, 0)
        before, self._last_counts = self._last_counts, now
        return now[0] - before[0], now[1] - before[1]


class PriorityLevel:
    def __init__(self) -> None:
        self.queues: OrderedDict[PromptQueue, None] = OrderedDict()
        self.unstarted: OrderedDict[PromptQueue, None] = OrderedDict()  # nothing sent to the engine yet


class TenantQueue:
    """Requests of one tenant; taking the next costs the same however many wait."""

    def __init__(self, name: str, order: QueueOrder) -> None:
        self.name = name
        self._order = order
        self.num_queues = 0
        self.num_flights = 0
        self.num_tokens = 0  # of each request's next prompt
        self._levels: dict[int, PriorityLevel] = {}
        self._priorities: list[int] = []  # heap of priorities, some of them stale
        self._known: set[int] = set()  # the heap's content

    def __iter__(self) -> Iterator[InFlightRequest]:
        for priority in sorted(self._levels):
            for queue in self._levels[priority].queues:
                yield from queue.flights

    def add(self, queue: PromptQueue) -> None:
        """Append to its priority level, unless already there."""
        level = self._levels.get(queue.priority)
        if level is None:
            level = self._levels[queue.priority] = PriorityLevel()
            if queue.priority not in self._known:
                self._known.add(queue.priority)
                heapq.heappush(self._priorities, queue.priority)
        if queue not in level.queues:
            level.queues[queue] = None
            if not queue.has_begun:
                level.unstarted[queue] = None

    @property
    def first(self) -> PromptQueue:
        return self._order.pick(self._best.queues)

    def choose(self, placement: Placement) -> PromptQueue | None:
        """Return the request to go next: one that fits, or else one that moves to an engine that runs dry. None if all
        had better wait for the engines that are best for them: each has the next place there that it is first for."""
        queues = self._best.queues
        near = list(islice(queues, MAX_FITTING))
        fitting = (queue for queue in near if placement.fits(queue.first))
        first = next(fitting, None)
        if first is not None:
            return self._order.pick(chain((first,), fitting))
        for queue in islice(queues, MAX_FITTING, MAX_CANDIDATES):
            if placement.fits(queue.first):
                return queue
        movable = [near[at] for at in placement.find_movable([queue.first for queue in near], len(queues))]
        return self._order.pick(movable) if movable else None

    @property
    def oldest_unstarted(self) -> PromptQueue | None:
        """The first unstarted request, if it has the best priority."""
        return next(iter(self._best.unstarted), None)

    @property
    def newest_unstarted(self) -> PromptQueue | None:
        """The last unstarted request of the worst priority."""
        level = max((priority for priority, level in self._levels.items() if level.unstarted), default=None)
        return None if level is None else next(reversed(self._levels[level].unstarted))

    @property
    def _best(self) -> PriorityLevel:
        while self._priorities[0] not in self._levels:
            self._known.remove(heapq.heappop(self._priorities))
        return self._levels[self._priorities[0]]

    def promote(self, queue: PromptQueue) -> None:
        queue.num_passed = MAX_PASSES
        self._levels[queue.priority].queues.move_to_end(queue, last=False)

    def begin(self, queue: PromptQueue) -> None:
        """Record that its first prompt is sent; it moves behind the others."""
        level = self._levels[queue.priority]
        self._order.record_start(queue, level.queues)
        queue.has_begun = True
        level.unstarted.pop(queue, None)
        level.queues.move_to_end(queue)

    def remove(self, queue: PromptQueue) -> None:
        level = self._levels[queue.priority]
        level.unstarted.pop(queue, None)
        del level.queues[queue]
        if not level.queues:
            del self._levels[queue.priority]
