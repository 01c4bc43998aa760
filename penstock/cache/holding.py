"""Blocks that a sequence owns, the block copies it waits for, and snapshots of its recurrent states."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from penstock.cache.group import Group
from penstock.cache.pool import BlockPool
from penstock.cache.radix import Node, Place, RadixCache, Root

ABSENT = -1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A recurrent group's state after `position` positions, copied by `plan`."""

    position: int
    group: int
    blocks: tuple[int, ...]
    plan: int


@dataclass(slots=True, eq=False)
class Holding:
    """A block table per group, and the sequence's node in the tree."""

    root: Root
    tables: list[list[int]]  # per group; recurrent groups: the blocks of the live state
    changed: list[dict[int, int]]  # per group: entries the device has not been told of
    first: list[int]  # per group: entries below are given up (windows)
    node: Node | None = None
    num_inserted: int = 0  # blocks of the sequence that are on its path in the tree
    resume: dict[int, tuple[int, ...]] = field(default_factory=dict)  # per group: the snapshot to start from
    snapshots: list[Snapshot] = field(default_factory=list)  # taken, not yet in the tree
    plan: int = -1  # the last plan that names these blocks
    num_restored: int = 0  # positions of the cached prefix that came from the store
    steady_until: int = 0  # positions below are computed one by one without a further look

    @property
    def num_blocks(self) -> int:
        return sum(len(table) - first for table, first in zip(self.tables, self.first))

    def append(self, g: int, block: int) -> None:
        """Add a block at the end of a group's table."""
        self.changed[g][len(self.tables[g])] = block
        self.tables[g].append(block)

    def has_any(self, blocks: Set[int]) -> bool:
        return any(not blocks.isdisjoint(table) for table in self.tables)

    def take_changes(self) -> tuple[dict[int, int], ...]:
        """Return the table entries of each group that the device does not know yet, and count them as told."""
        if not any(self.changed):
            return ()
        changed = tuple(self.changed)
        self.changed = [{} for _ in changed]
        return changed


def make_holding(root: Root, num_groups: int) -> Holding:
    return Holding(root, [[] for _ in range(num_groups)], [{} for _ in range(num_groups)], [0] * num_groups)


@dataclass(frozen=True, slots=True)
class Copy:
    """A block copy due before the next step, and the holding that relies on it."""

    source: int
    target: int
    holding: Holding


class CopyQueue:
    def __init__(self) -> None:
        self.pending: list[Copy] = []
        self.num_copied = 0  # since the start

    def add(self, source: int, target: int, holding: Holding) -> None:
        self.pending.append(Copy(source, target, holding))
        self.num_copied += 1

    def drop(self, holding: Holding) -> None:
        self.pending = [copy for copy in self.pending if copy.holding is not holding]

    def take(self) -> list[Copy]:
        """Empty the queue."""
        copies, self.pending = self.pending, []
        return copies


MIN_STRIDE = 512  # positions: each snapshot ends a prefill chunk
MIN_STRIDE_BLOCKS = 4
MAX_SHARE = 4  # snapshots fill a quarter of the pool at most


def choose_stride(groups: Sequence[Group], block_size: int, min_stride: int) -> int:
    """Space snapshots so that they take no more bytes than the keys and values of full attention between them."""
    state_bytes = sum(group.spec.bytes_per_state * len(group.layers) for group in groups)
    full = [group for group in groups if group.spec.kind == "full"]
    position_bytes = sum(group.spec.bytes_per_position * len(group.layers) for group in full)
    positions = max(min_stride, MIN_STRIDE_BLOCKS * block_size, state_bytes // position_bytes if full else 0)
    return -(-positions // block_size) * block_size


class Snapshots:
    """States fill `state_blocks` blocks a sequence. Without recurrent groups there is nothing to do here."""

    def __init__(self, pool: BlockPool, tree: RadixCache, copies: CopyQueue) -> None:
        self._pool, self._tree, self._copies = pool, tree, copies
        self._groups = [g for g, group in enumerate(tree.groups) if not group.is_paged]
        self.state_blocks = sum(tree.groups[g].blocks_per_state for g in self._groups)
        self.max_blocks = max(pool.num_blocks // MAX_SHARE, self.state_blocks)
        self._kept: dict[Place, int] = {}  # blocks of each snapshot in the tree; some may be evicted by now
        self._num_taken = 0  # blocks of snapshots not yet in the tree

    @property
    def num_held(self) -> int:
        """Blocks that snapshots fill."""
        kept = (count for (node, g), count in self._kept.items() if node.slots[g] is not None)
        return self._num_taken + sum(kept)

    def start(self, holding: Holding, plan: int) -> None:
        """Give a holding blocks for its states, copied from the snapshot it resumes from. Call `ensure` first."""
        for g in self._groups:
            if not holding.tables[g]:
                for _ in range(self._tree.groups[g].blocks_per_state):
                    holding.append(g, self._pool.take())
                for source, target in zip(holding.resume.pop(g, ()), holding.tables[g]):
                    self._copies.add(source, target, holding)
                    self._pool.release(source, plan)

    def fork(self, parent: Holding, child: Holding) -> None:
        """Copy the parent's states. Call `ensure` first."""
        for g in self._groups:
            for block in parent.tables[g]:
                child.append(g, self._pool.take())
                self._copies.add(block, child.tables[g][-1], child)

    def take(self, holding: Holding, position: int, plan: int) -> None:
        """Copy the recurrent states as they are at `position`, before `plan`, if blocks can be had."""
        if holding.node is None or not self.make_room():
            return
        for g in self._groups:
            blocks = []
            for block in holding.tables[g]:
                blocks.append(self._pool.take())
                self._copies.add(block, blocks[-1], holding)
            holding.snapshots.append(Snapshot(position, g, tuple(blocks), plan))
            self._num_taken += len(blocks)

    def keep(self, holding: Holding, plan: int) -> None:
        """Put the snapshots of an ended plan into the tree, before `insert` moves on from where they were taken."""
        for snapshot in [s for s in holding.snapshots if s.plan <= plan]:
            node, g = holding.node, snapshot.group
            at_node = snapshot.position == holding.num_inserted * self._tree.block_size
            if node is not None and at_node and node.slots[g] is None:
                self._tree.hold(node, g, snapshot.blocks)
                self._kept[node, g] = len(snapshot.blocks)
            self._release(snapshot)
            holding.snapshots.remove(snapshot)

    def note(self, node: Node, g: int, slot: tuple[int, ...]) -> None:
        """Count a snapshot that the tree has got from elsewhere."""
        if not self._tree.groups[g].is_paged:
            self._kept[node, g] = len(slot)

    def release(self, holding: Holding) -> None:
        """Give up snapshots that are not in the tree."""
        for snapshot in holding.snapshots:
            self._release(snapshot)
        holding.snapshots.clear()
        for blocks in holding.resume.values():
            self._pool.release_all(blocks, holding.plan)
        holding.resume.clear()

    def _release(self, snapshot: Snapshot) -> None:
        self._pool.release_all(snapshot.blocks, snapshot.plan)
        self._num_taken -= len(snapshot.blocks)

    def make_room(self) -> bool:
        """Free blocks for one more snapshot, those of the least recently used ones where snapshots fill their share."""
        for node, g in [place for place in self._kept if place[0].slots[place[1]] is None]:
            del self._kept[node, g]
        for node, g in sorted(self._kept, key=lambda place: (place[0].rank, place[0].used)):
            if self.num_held + self.state_blocks <= self.max_blocks:
                break
            if self._tree.is_idle(node, g):
                del self._kept[node, g]
                self._tree.drop([(node, g)])
        return self.num_held + self.state_blocks <= self.max_blocks and self._tree.evict(self.state_blocks)

    def check(self, holdings: Sequence[Holding]) -> None:
        taken = [snapshot for holding in holdings for snapshot in holding.snapshots]
        if self._num_taken != sum(len(snapshot.blocks) for snapshot in taken):
            raise AssertionError("the count of snapshot blocks outside the tree is wrong")
        held = {(node, g) for node in self._tree.nodes() for g in self._groups if node.slots[g] is not None}
        if not held <= self._kept.keys() or self.num_held > self.max_blocks:
            raise AssertionError("the tree has snapshots that are not counted, or too many")
