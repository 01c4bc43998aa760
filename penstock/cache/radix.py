"""A tree over token keys, one block of positions per node, that remembers which blocks hold which prefix."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator, Sequence

from penstock.cache.group import Group
from penstock.cache.pool import BlockPool
from penstock.cache.salt import Salt, key_of, root_of

Key = tuple[Hashable, ...]
Slot = tuple[int, ...]  # the blocks one group holds at a node: one, or a whole snapshot


def chained(chain: int, key: Key) -> int:
    """What stands for a prefix and one more block."""
    return hash((chain, key))


class Node:
    """The block that follows its parent's prefix. `slots[g]` is what group g holds here, None for nothing."""

    __slots__ = ("chain", "children", "key", "parent", "pins", "queued", "slots", "used")

    def __init__(self, parent: Node | None, key: Key, num_groups: int) -> None:
        self.parent = parent
        self.key = key
        self.chain: int = chained(0 if parent is None else parent.chain, key)  # stands for its whole prefix
        self.children: dict[Key, Node] = {}
        self.slots: list[Slot | None] = [None] * num_groups
        self.pins = 0  # sequences whose own path ends here
        self.used = 0
        self.queued = [False] * num_groups  # stands in the eviction queue already


Place = tuple[Node, int]  # what one group holds at a node


class RadixCache:
    """Holds one ownership of every block in it. A block that someone else owns too is in use and is never evicted."""

    def __init__(self, pool: BlockPool, groups: Sequence[Group], block_size: int) -> None:
        self.pool = pool
        self.groups = groups
        self.block_size = block_size
        self.num_evicted = 0
        self.version = 0  # grows when a path may be another than before
        self._roots: dict[Hashable, Node] = {}
        self._clock = 0
        self._owner: dict[int, tuple[Node, int]] = {}  # block -> where it is held
        self._queue: list[tuple[int, int, int, Node, int]] = []  # candidates for eviction, oldest first
        self._tick = 0
        self._pins = 0  # of all nodes
        self._full = [group.spec.kind == "full" for group in groups]

    def root(self, salt: Hashable) -> Node:
        """The empty prefix; prefixes under different salts are never shared."""
        salt = root_of(salt)
        return self._roots.setdefault(salt, Node(None, (salt,), len(self.groups)))

    def chain_of_root(self, salt: Hashable) -> int:
        return chained(0, (root_of(salt),))

    def match(
        self, salt: Hashable, tokens: Sequence[int], length: int | None = None, known: Sequence[Node] = ()
    ) -> list[Node]:
        """The nodes of the longest path whose keys are the beginning of `tokens`, or of the first `length` of them.
        `known` is a beginning of that path."""
        node = known[-1] if known else self._roots.get(root_of(salt))
        path = list(known)
        size, first = self.block_size, len(known) * self.block_size
        salted = isinstance(salt, Salt)
        rest = tuple(tokens[first:])  # whose parts are keys as they are
        for start in range(0, (len(tokens) if length is None else length) - first - size + 1, size):
            if node is None or not node.children:
                break
            node = node.children.get(
                key_of(salt, tokens, first + start, size) if salted else rest[start : start + size]
            )
            if node is not None:
                path.append(node)
        return path

    def usable(self, path: Sequence[Node]) -> int:
        """The longest prefix of the path, in blocks, that every group can resume after."""
        if all(self._full):  # there is no node without such a block
            return len(path)
        accepted = [True] * len(path)
        for g, group in enumerate(self.groups):
            verdicts = group.spec.usable([node.slots[g] is not None for node in path], self.block_size)
            accepted = [a and b for a, b in zip(accepted, verdicts)]
        return max((i + 1 for i, ok in enumerate(accepted) if ok), default=0)

    def touch(self, path: Sequence[Node]) -> None:
        """Mark a path as just used: it is evicted last."""
        self._clock += 1
        for node in path:
            node.used = self._clock

    def extend(self, node: Node, key: Key) -> Node:
        """The child of `node` under `key`, made if it is not there."""
        child = node.children.get(key)
        if child is None:
            self.version += 1
            child = node.children[key] = Node(node, key, len(self.groups))
        self._clock += 1
        child.used = self._clock
        return child

    def hold(self, node: Node, g: int, slot: Slot) -> None:
        """Become one of the owners of these blocks."""
        if node.slots[g] is not None:
            raise RuntimeError("the slot is taken")
        self.version += 1
        node.slots[g] = slot
        for block in slot:
            self.pool.cache(block)
            self._owner[block] = (node, g)

    def pin(self, node: Node) -> None:
        node.pins += 1
        self._pins += 1

    def unpin(self, node: Node) -> None:
        node.pins -= 1
        self._pins -= 1
        self._prune(node)

    def on_idle(self, block: int) -> None:
        """The pool says that nobody but the tree owns the block now."""
        self._offer(*self._owner[block])

    def evict(self, num_free: int) -> bool:
        """Give up the least recently used idle blocks until the pool has `num_free` free ones; False if it cannot."""
        while self.pool.num_free < num_free:
            if not self._queue:
                return False
            used, _, _, node, g = heapq.heappop(self._queue)
            node.queued[g] = False
            if not self._evictable(node, g):
                continue
            if node.used > used:
                self._offer(node, g)
                continue
            self._give_up(node, g)
            self._prune(node)
        return True

    def clear(self) -> None:
        """Give up everything that is idle."""
        groups = range(len(self.groups))
        self._queue = []
        if not self._pins and self.pool.num_idle == len(self._owner):
            self._clear_all()
            return
        for node in reversed(list(self.nodes())):  # children before their parents
            for g in groups:
                node.queued[g] = False
                if self._evictable(node, g):
                    self._give_up(node, g)
            self._unlink(node)

    def _clear_all(self) -> None:
        """Nobody uses anything: no node needs a look of its own."""
        for node in list(self.nodes()):
            node.children.clear()
            node.slots = [None] * len(self.groups)
        for block in self._owner:
            self.pool.uncache(block)
        self.num_evicted += len(self._owner)
        self.version += 1
        self._owner.clear()
        self._roots.clear()

    def _give_up(self, node: Node, g: int) -> None:
        """Without its block of a full group a node is of no use to the others."""
        for other in range(len(self.groups)) if self._full[g] else (g,):
            self._drop(node, other)

    def _evictable(self, node: Node, g: int) -> bool:
        slot = node.slots[g]
        if slot is None:
            return False
        if not self._full[g]:
            return self._idle(slot)
        return not node.children and not node.pins and all(s is None or self._idle(s) for s in node.slots)

    def _idle(self, slot: Slot) -> bool:
        return all(self.pool.refs[block] == 1 for block in slot)

    def _offer(self, node: Node, g: int) -> None:
        """Queue a slot for eviction; windows and snapshots go before whole nodes of the same age."""
        if not node.queued[g] and self._evictable(node, g):
            node.queued[g] = True
            self._tick += 1
            heapq.heappush(self._queue, (node.used, int(self._full[g]), self._tick, node, g))

    def _drop(self, node: Node, g: int) -> None:
        slot = node.slots[g]
        if slot is None:
            return
        self.version += 1
        node.slots[g] = None
        for block in slot:
            del self._owner[block]
            self.pool.uncache(block)
        self.num_evicted += len(slot)

    def behind(self, places: Iterable[Place]) -> list[Place]:
        """Those of the places that hold something, and where one is of a full group, all that depends on it."""
        found = dict.fromkeys((node, g) for node, g in places if node.slots[g] is not None)
        stack = [node for node, g in found if self._full[g]]
        seen: set[Node] = set()
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                found.update(dict.fromkeys((node, g) for g, slot in enumerate(node.slots) if slot is not None))
                stack.extend(node.children.values())
        return list(found)

    def drop(self, places: Iterable[Place]) -> None:
        """Give up what is held there; nobody else may own it."""
        nodes: dict[Node, None] = {}
        for node, g in places:
            self._drop(node, g)
            nodes[node] = None
        for node in nodes:
            self._prune(node)

    def _prune(self, node: Node) -> None:
        """Take out empty nodes upwards; a parent that became a leaf may be evicted next."""
        while self._unlink(node) and node.parent is not None:
            node = node.parent
        if not node.children and not node.pins:
            for g in range(len(self.groups)):
                if self._full[g]:
                    self._offer(node, g)

    def _unlink(self, node: Node) -> bool:
        """Take a node out of the tree, if there is nothing in it."""
        if node.children or node.pins or any(node.slots):
            return False
        if node.parent is None:
            self._roots.pop(node.key[0], None)
        elif node.parent.children.get(node.key) is not node:
            return False  # it is out already
        else:
            self.version += 1
            del node.parent.children[node.key]
        return True

    def nodes(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        held: dict[int, tuple[Node, int]] = {}
        for node in self.nodes():
            for key, child in node.children.items():
                salted = len(key) == self.block_size + 1
                if child.parent is not node or child.key != key or len(key) != self.block_size + salted:
                    raise AssertionError("the tree is mislinked")
            for g, slot in enumerate(node.slots):
                if self._full[g] and slot is None and node.parent is not None:
                    raise AssertionError("a full group misses a block inside a path")
                for block in slot or ():
                    if block in held or self.pool.refs[block] < 1:
                        raise AssertionError(f"block {block} is held twice or held and free")
                    held[block] = (node, g)
            if node.parent is not None and not node.children and not node.pins and not any(node.slots):
                raise AssertionError("an empty leaf was left in the tree")
        if held != self._owner or self._pins != sum(node.pins for node in self.nodes()):
            raise AssertionError("the tree's list of its blocks, or its count of pins, is wrong")
        queued = {(node, g) for _, _, _, node, g in self._queue}
        if any(self._evictable(*where) and where not in queued for where in set(held.values())):
            raise AssertionError("an idle slot was never offered for eviction")
