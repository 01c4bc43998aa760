"""The order of one tenant's waiting requests, by --scheduling-policy. Turns among tenants and priorities come before
it."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.server.flight import Flight
    from penstock.server.line import Line

PASSES = 16  # a request overtaken this often is overtaken no more
LOOK_AHEAD = 128  # requests among which one is chosen
BLOCK_TOKENS = 16  # that one key of a prefix stands for
MAX_KEYS = 4096  # of a prompt: as many blocks of it as are compared
MIN_KNOWN_TOKENS = 8192


class Order(Protocol):
    def first(self, lines: Iterable[Line]) -> Line:
        """The line to go next, of some in the order of their turns."""

    def begin(self, line: Line, lines: Iterable[Line]) -> None:
        """Its first prompt goes to the engine, out of `lines`."""

    def open(self, cache_tokens: int) -> None:
        """An engine with a new, empty cache is ready."""


class ByTurn:
    """First come, first served; requests of several prompts take turns."""

    def first(self, lines: Iterable[Line]) -> Line:
        return next(iter(lines))

    def begin(self, line: Line, lines: Iterable[Line]) -> None:
        pass

    def open(self, cache_tokens: int) -> None:
        pass


class _Overtaking:
    """The line of the least cost, among the first few; one that was overtaken often enough is overtaken no more."""

    def first(self, lines: Iterable[Line]) -> Line:
        near = list(islice(lines, LOOK_AHEAD))
        overdue = next((line for line in near if line.num_passed >= PASSES), None)
        return overdue or min(near, key=lambda line: self.cost(line.first))

    def begin(self, line: Line, lines: Iterable[Line]) -> None:
        for other in islice(lines, LOOK_AHEAD):
            if other is line:
                break
            other.num_passed += 1
        line.num_passed = 0

    def open(self, cache_tokens: int) -> None:
        pass

    def cost(self, flight: Flight) -> int:
        raise NotImplementedError


class ShortestFirst(_Overtaking):
    """The fewest tokens to compute before the next output first."""

    def cost(self, flight: Flight) -> int:
        return len(flight.request.tokens) + max(map(len, flight.outputs.values()), default=0)


class LongestPrefix(_Overtaking):
    """The prompt first whose beginning the engine most likely has in its cache: it was sent there lately. The engine,
    which knows, chooses again among the few that it has."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, None] = OrderedDict()  # keys of blocks, the last used at the end
        self._max_known = MIN_KNOWN_TOKENS // BLOCK_TOKENS

    def open(self, cache_tokens: int) -> None:
        self._known.clear()
        self._max_known = max(MIN_KNOWN_TOKENS, cache_tokens) // BLOCK_TOKENS

    def begin(self, line: Line, lines: Iterable[Line]) -> None:
        super().begin(line, lines)
        for key in reversed(_keys(line.first)):  # so that no block is forgotten before those behind it
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._max_known:
            self._known.popitem(last=False)

    def cost(self, flight: Flight) -> int:
        return -bisect_left(_keys(flight), True, key=lambda key: key not in self._known)


def _keys(flight: Flight) -> tuple[int, ...]:
    """One for each whole block of its prompt, which stands for that block and all before it."""
    if flight.prefix_keys is None:
        tokens, key, keys = flight.request.tokens, hash((flight.tenant, flight.request.salt)), []
        for begin in range(0, min(len(tokens), MAX_KEYS * BLOCK_TOKENS) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            key = hash((key, tokens[begin : begin + BLOCK_TOKENS]))
            keys.append(key)
        flight.prefix_keys = tuple(keys)
    return flight.prefix_keys


ORDERS: dict[str, type[ByTurn] | type[ShortestFirst] | type[LongestPrefix]] = {
    "fcfs": ByTurn,
    "priority": ByTurn,
    "sjf": ShortestFirst,
    "lpm": LongestPrefix,
}


def make_order(policy: str) -> Order:
    return ORDERS[policy]()
