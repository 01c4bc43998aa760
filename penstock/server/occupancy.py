"""The parts that an engine has: how many of its rows each tenant and each client request takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from penstock.server.flight import STARTED_COST, Flight, Part
from penstock.server.line import Line

MAX_RECALL_COST = 64  # after which a part is left where it is


class Occupancy:
    def __init__(self) -> None:
        self._parts: dict[str, Part] = {}  # by their ids, the oldest first
        self._tenants: Counter[str] = Counter()
        self._lines: Counter[Line | None] = Counter()
        self.num_rows = 0

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts.values())

    def __len__(self) -> int:
        return len(self._parts)

    def get(self, id: str) -> Part | None:
        return self._parts.get(id)

    def add(self, part: Part) -> None:
        self._parts[part.id] = part
        self._count(part, len(part.siblings))

    def end_sibling(self, part: Part, sibling: int) -> None:
        part.siblings.discard(sibling)
        self._count(part, -1)

    def remove(self, part: Part) -> bool:
        """Whether it was there."""
        if self._parts.pop(part.id, None) is None:
            return False
        self._count(part, -len(part.siblings))
        return True

    def clear(self) -> list[Part]:
        parts = list(self._parts.values())
        self._parts.clear()
        self._tenants.clear()
        self._lines.clear()
        self.num_rows = 0
        return parts

    @property
    def tenants(self) -> list[str]:
        return list(self._tenants)

    def _count(self, part: Part, change: int) -> None:
        self.num_rows += change
        for counts, key in ((self._tenants, part.flight.tenant), (self._lines, part.flight.line)):
            counts[key] += change  # type: ignore[index]
            if counts[key] <= 0:  # type: ignore[index]
                del counts[key]  # type: ignore[arg-type]

    def find_recalls(
        self, flight: Flight, shares: Mapping[str, float], max_rows: int, is_held: Callable[[Part], bool]
    ) -> list[Part]:
        """Parts to take back, the newest first, so that `flight` finds a row: those of the tenant furthest over its
        share, if its own is below; within its tenant those of the request that has most, if its own has none."""
        if self.num_rows < max_rows:
            return []
        size = len(flight.parts[0].siblings) if flight.parts else 1
        over = {
            name: count / shares[name]
            for name, count in self._tenants.items()
            if name != flight.tenant and count > shares[name] * max_rows
        }
        own = self._tenants[flight.tenant]
        if over and (not own or own + size <= shares[flight.tenant] * max_rows):
            worst = max(over, key=over.__getitem__)
            floor = shares[worst] * max_rows
            return self._newest(
                lambda part: part.flight.tenant == worst and not is_held(part),
                self._tenants[worst],
                floor,
                max_rows - size,
            )
        if flight.line in self._lines:
            return []
        lines = {part.flight.line for part in self if part.flight.tenant == flight.tenant}
        line = max(lines, key=lambda one: self._lines[one], default=None)
        if line is None:
            return []
        return self._newest(
            lambda part: part.flight.line is line and not is_held(part), self._lines[line], 1, max_rows - size
        )

    def _newest(self, fits: Callable[[Part], bool], has: int, floor: float, max_rows: int) -> list[Part]:
        """Until so few rows are taken; whose they are keeps `floor` of them."""
        found: list[Part] = []
        num_rows = self.num_rows
        for part in reversed(self._parts.values()):
            if num_rows <= max(0, max_rows):
                break
            cost = STARTED_COST if part.num_tokens else 1
            if fits(part) and has - len(part.siblings) >= floor and part.recall_cost + cost <= MAX_RECALL_COST:
                found.append(part)
                has -= len(part.siblings)
                num_rows -= len(part.siblings)
        return found
