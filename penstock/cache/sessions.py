"""Sessions: paths of the tree that are evicted after all others, until their time or the room for them runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.cache.radix import Node, RadixCache
from penstock.cache.uncomputed import walk_up
from penstock.types import Request

SHARE = 2  # sessions keep half of the pool at most
Name = tuple[str, str]  # tenant, and the session's own name


@dataclass(slots=True)
class KeptSession:
    """The path to `node` is kept until `end_s`."""

    node: Node
    end_s: float
    request: Request  # the last one of the session
    tokens: tuple[int, ...]  # of the path

    @property
    def num_positions(self) -> int:
        return len(self.tokens)


class Sessions:
    def __init__(self, tree: RadixCache, clock: Callable[[], float]) -> None:
        self._tree, self._clock = tree, clock
        self._sessions: dict[Name, KeptSession] = {}  # the one used the longest ago first

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, name: Name) -> KeptSession | None:
        self.expire()
        return self._sessions.get(name)

    def keep(self, request: Request, node: Node, tokens: Sequence[int]) -> None:
        """Keep the path to a node, which `tokens` begin with, in place of the former one of a request's session."""
        name, count = (request.tenant, request.session), 0
        for each in walk_up(node):
            each.kept += 1
            count += each.parent is not None
        self.erase(name)
        self._sessions[name] = KeptSession(
            node, self._clock() + request.session_s, request, tuple(tokens[: count * self._tree.block_size])
        )
        self.expire()

    def erase(self, name: Name) -> bool:
        """Let a session's path be evicted as any other; False if there is none."""
        session = self._sessions.pop(name, None)
        if session is None:
            return False
        for node in walk_up(session.node):
            node.kept -= 1
            if not node.kept:
                self._offer_anew(node)
        return True

    def expire(self) -> None:
        """End the sessions whose time is over, and the oldest ones beyond the room for them."""
        now = self._clock()
        for name in [name for name, session in self._sessions.items() if session.end_s <= now]:
            self.erase(name)
        while len(self._sessions) > 1 and self._count_blocks() * SHARE > self._tree.pool.num_blocks:
            self.erase(next(iter(self._sessions)))

    def _count_blocks(self) -> int:
        nodes = {node for session in self._sessions.values() for node in walk_up(session.node)}
        return sum(len(slot) for node in nodes for slot in node.slots if slot is not None)

    def _offer_anew(self, node: Node) -> None:
        """Queue what is idle at a node for eviction, where its lower rank puts it."""
        for g in self._list_idle(node):
            node.queued[g] = False
            self._tree.on_idle((node.slots[g] or ())[0])

    def _list_idle(self, node: Node) -> Iterator[int]:
        return (g for g, slot in enumerate(node.slots) if slot and self._tree.is_idle(node, g))


def retain(node: Node | None, priority: int) -> None:
    """Let a path be evicted after those of lower priority."""
    for each in walk_up(node):
        each.priority = max(each.priority, priority)
