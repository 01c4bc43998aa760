"""Prefix tree over token keys: one block of positions per node, and the pool blocks that hold it."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.cache.group import Group
from penstock.cache.pool import BlockPool


@dataclass(frozen=True)
class Root:
    """Requests with equal roots share prefixes; the first `num_public` positions are shared whatever the salt."""

    salt: str = ""  # tenant and cache salt
    num_public: int = 0
    adapter: str = ""

    @property
    def base(self) -> Root:
        """The root under which the prefix tree keeps this one's blocks."""
        return replace(self, salt="", num_public=0) if self.num_public else self

    def key(self, tokens: Sequence[int], start: int, block_size: int) -> tuple[Hashable, ...]:
        """Make the tree key of the block at `start`: its tokens, and the salt where the private part begins."""
        key = tokens[start : start + block_size]
        if type(key) is not tuple:
            key = tuple(key)
        if self.num_public and start == self.num_public - self.num_public % block_size:
            return (*key, self.salt)
        return key


Key = tuple[Hashable, ...]
Slot = tuple[int, ...]  # the blocks one group holds at a node: one, or a whole snapshot


def chain_hash(chain: int, key: Key) -> int:
    """Hash a prefix, given by its own chain hash, and one more block."""
    return hash((chain, key))


class Node:
    """The block that follows its parent's prefix. `slots[g]` are the blocks of group g here, None for none."""

    __slots__ = ("chain", "children", "digest", "key", "kept", "parent", "pins", "priority", "queued", "slots", "used")

    def __init__(self, parent: Node | None, key: Key, num_groups: int) -> None:
        self.parent = parent
        self.key = key
        self.chain: int = chain_hash(0 if parent is None else parent.chain, key)  # of its whole prefix
        self.children: dict[Key, Node] = {}
        self.digest: bytes | None = None  # of its whole prefix, the same in every process; made when needed
        self.slots: list[Slot | None] = [None] * num_groups
        self.pins = 0  # sequences whose own path ends here
        self.used = 0
        self.priority = 0  # of retention: what has less is evicted first
        self.kept = 0  # sessions whose path this is part of: evicted after all others
        self.queued = [False] * num_groups  # stands in the eviction queue already

    @property
    def rank(self) -> int:
        """Order nodes for eviction, before the time of their last use."""
        return KEPT if self.kept else self.priority


KEPT = 1 << 30
Place = tuple[Node, int]  # a node and a group


class RadixCache:
    """Holds one ownership of every block in it. A block that someone else owns too is in use and is never evicted."""

    def __init__(self, pool: BlockPool, groups: Sequence[Group], block_size: int) -> None:
        self.pool = pool
        self.groups = groups
        self.block_size = block_size
        self.num_evicted = 0
        self.version = 0  # grows when a path may be another than before
        self.idle: dict[Place, None] | None = None  # places that fell idle, while someone watches
        self._roots: dict[Hashable, Node] = {}
        self._clock = 0
        self._owner: dict[int, tuple[Node, int]] = {}  # block -> where it is held
        self._queue: list[tuple[int, int, int, int, Node, int]] = []  # candidates for eviction, the first one first
        self._tick = 0
        self._pins = 0  # of all nodes
        self._full = [group.spec.kind == "full" for group in groups]

    def root(self, root: Root) -> Node:
        """Return the node of the empty prefix; prefixes under different roots are never shared."""
        return self._roots.setdefault(root.base, Node(None, (root.base,), len(self.groups)))

    def match(
        self, root: Root, tokens: Sequence[int], length: int | None = None, known: Sequence[Node] = ()
    ) -> list[Node]:
        """Return the longest path whose keys are the beginning of `tokens`, or of the first `length` of them.
        `known` is a beginning of that path."""
        node = known[-1] if known else self._roots.get(root.base)
        path = list(known)
        size, first = self.block_size, len(known) * self.block_size
        rest = tuple(tokens[first:])  # its slices are keys
        for start in range(0, (len(tokens) if length is None else length) - first - size + 1, size):
            if node is None or not node.children:
                break
            node = node.children.get(
                root.key(tokens, first + start, size) if root.num_public else rest[start : start + size]
            )
            if node is not None:
                path.append(node)
        return path

    def count_usable(self, path: Sequence[Node]) -> int:
        """Return the longest prefix of the path, in blocks, that every group can resume after."""
        if all(self._full):  # every node has a block of each
            return len(path)
        accepted = [True] * len(path)
        for g, group in enumerate(self.groups):
            verdicts = group.spec.find_resumable([node.slots[g] is not None for node in path], self.block_size)
            accepted = [a and b for a, b in zip(accepted, verdicts)]
        return max((i + 1 for i, ok in enumerate(accepted) if ok), default=0)

    def touch(self, path: Sequence[Node]) -> None:
        """Mark a path as just used: it is evicted last."""
        self._clock += 1
        for node in path:
            node.used = self._clock

    def extend(self, node: Node, key: Key) -> Node:
        """Return the child of `node` under `key`; make it if it is not there."""
        child = node.children.get(key)
        if child is None:
            self.version += 1
            child = node.children[key] = Node(node, key, len(self.groups))
        self._clock += 1
        child.used = self._clock
        return child

    def hold(self, node: Node, g: int, slot: Slot) -> None:
        """Make the tree one of the owners of these blocks."""
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
        """Offer a block for eviction: only the tree owns it now."""
        place = self._owner[block]
        if self.idle is not None:
            self.idle[place] = None
        self._offer(*place)

    def evict(self, num_free: int) -> bool:
        """Give up the least recently used idle blocks until the pool has `num_free` free ones; False if it cannot."""
        while self.pool.num_free < num_free:
            if not self._queue:
                return False
            rank, used, _, _, node, g = heapq.heappop(self._queue)
            node.queued[g] = False
            if not self._is_evictable(node, g):
                continue
            if (node.rank, node.used) > (rank, used):
                self._offer(node, g)
                continue
            self._give_up(node, g)
            self._prune(node)
        return True

    def clear(self) -> None:
        """Give up everything that is idle."""
        self._queue = []
        if not self._pins and self.pool.num_idle == len(self._owner):
            self._clear_all()
            return
        for node in reversed(list(self.nodes())):  # children before their parents
            for g in range(len(self.groups)):
                node.queued[g] = False
                if self._is_evictable(node, g):
                    self._give_up(node, g)
            self._unlink(node)

    def _clear_all(self) -> None:
        """Give up all nodes at once: none is in use."""
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
        """Drop a group's blocks of a node; without a full group's block the node is useless, so all go."""
        for other in range(len(self.groups)) if self._full[g] else (g,):
            self._drop(node, other)

    def _is_evictable(self, node: Node, g: int) -> bool:
        if node.slots[g] is None:
            return False
        if not self._full[g]:
            return self.is_idle(node, g)
        return not node.children and not node.pins and all(self.is_idle(node, each) for each in range(len(self._full)))

    def is_idle(self, node: Node, g: int) -> bool:
        """True if only the tree owns what the group holds at the node."""
        return all(self.pool.refs[block] == 1 for block in node.slots[g] or ())

    def _offer(self, node: Node, g: int) -> None:
        """Queue a slot for eviction; windows and snapshots go before whole nodes of the same age."""
        if not node.queued[g] and self._is_evictable(node, g):
            node.queued[g] = True
            self._tick += 1
            heapq.heappush(self._queue, (node.rank, node.used, int(self._full[g]), self._tick, node, g))

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

    def find_dependents(self, places: Iterable[Place]) -> list[Place]:
        """List the places that hold something, and all that depends on those of full groups."""
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

    def drop(self, places: Sequence[Place]) -> None:
        """Give up the blocks held there, which must be idle."""
        for node, g in places:
            self._drop(node, g)
        for node in dict.fromkeys(node for node, _ in places):
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
        """Take a node out of the tree, if it is empty."""
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
        queued = {(node, g) for *_, node, g in self._queue}
        if any(self._is_evictable(*where) and where not in queued for where in set(held.values())):
            raise AssertionError("an idle slot was never offered for eviction")


Found = tuple[Sequence[int], int, Root, int, list[Node]]  # tokens, their number, root, the tree's version, the path


class PrefixLookup:
    def __init__(self, tree: RadixCache) -> None:
        self._tree = tree
        self._last: Found | None = None

    def find(self, root: Root, tokens: Sequence[int]) -> list[Node]:
        """Return the path of the longest usable prefix. The last token never is: it must be computed."""
        last, self._last = self._last, None
        if last is None or last[0] is not tokens or last[1:4] != (len(tokens), root, self._tree.version):
            path = self._tree.match(root, tokens, len(tokens) - 1, self._find_common(last, root, tokens))
            last = (tokens, len(tokens), root, self._tree.version, path[: self._tree.count_usable(path)])
        self._last = last
        return last[4]

    def _find_common(self, last: Found | None, root: Root, tokens: Sequence[int]) -> list[Node]:
        """Return the last path if `tokens` begin with it: requests that come together often share a prefix."""
        if last is None or last[2:4] != (root, self._tree.version):
            return []
        length = len(last[4]) * self._tree.block_size
        return last[4] if length < len(tokens) and last[0][:length] == tokens[:length] else []
