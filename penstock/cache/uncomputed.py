"""Places of the tree that plans which have not ended are still to compute, or to load."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.cache.holding import Holding
from penstock.cache.radix import Node, Place, RadixCache


class Uncomputed:
    def __init__(self, tree: RadixCache) -> None:
        self._tree = tree
        self._by_plan: dict[int, list[Place]] = {}

    def add(self, plan: int, place: Place) -> None:
        self._by_plan.setdefault(plan, []).append(place)

    def end(self, plan: int) -> None:
        """Forget what `plan` put into the tree: it is computed now, or is about to be taken back."""
        self._by_plan.pop(plan, None)

    def list_places(self) -> list[Place]:
        return [place for places in self._by_plan.values() for place in places]

    def find(self, holding: Holding | None = None) -> list[Place]:
        """List what unfinished plans put into the tree, or the part that relies on this holding's path; with all that
        depends on it."""
        due = self.list_places()
        if holding is not None:
            path = set(walk_up(holding.node))
            first = {node for node, _ in due if node in path}
            due = [place for place in due if not first.isdisjoint(walk_up(place[0]))]
        return self._tree.find_dependents(due)

    def check(self, ended: int) -> None:
        if any(plan <= ended for plan in self._by_plan):
            raise AssertionError("a plan that has ended is still to compute something")


def walk_up(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent
