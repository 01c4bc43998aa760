"""The cache as the scheduler sees it: match a prefix, grow by a few positions, give everything back."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from penstock.cache.group import Group
from penstock.cache.pool import BlockPool
from penstock.cache.radix import Node, Place, RadixCache
from penstock.cache.salt import key_of

ABSENT = -1
Asked = tuple[Sequence[int], int, Hashable, int, list[Node]]  # tokens, how many, salt, the tree's version, the path


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A recurrent group's state after `position` positions, copied by `plan`."""

    position: int
    group: int
    blocks: tuple[int, ...]
    plan: int


@dataclass(slots=True, eq=False)
class Holding:
    """What one sequence owns: a block table per group, and its place in the tree."""

    salt: Hashable
    tables: list[list[int]]  # per group; recurrent groups: the blocks of the live state
    changed: list[dict[int, int]]  # per group: entries the device has not been told of
    first: list[int]  # per group: entries below are given up (windows)
    node: Node | None = None
    num_inserted: int = 0  # blocks of the sequence that are on its path in the tree
    resume: dict[int, tuple[int, ...]] = field(default_factory=dict)  # per group: the snapshot to start from
    snapshots: list[Snapshot] = field(default_factory=list)  # taken, not yet in the tree
    plan: int = -1  # the last plan that names these blocks
    steady_until: int = 0  # positions below are computed one by one without a further look


@dataclass(frozen=True, slots=True)
class Copy:
    """A block copy due before the next step, and the holding that relies on it."""

    source: int
    target: int
    holding: Holding


class KVCache:
    """One pool, one tree, one table per group. Policy (who may have blocks) is the caller's."""

    def __init__(self, num_blocks: int, block_size: int, groups: Sequence[Group], enable_prefix_caching: bool = True):
        self.block_size = block_size
        self.groups = tuple(groups)
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, self._on_idle)
        self.tree = RadixCache(self.pool, self.groups, block_size)
        self.copies: list[Copy] = []
        self.num_copied = 0
        self.recurrent = [g for g, group in enumerate(self.groups) if group.spec.kind == "recurrent"]
        # The last path looked for: who asks whether to wait for a prefix asks for the prefix next.
        self._asked: Asked | None = None
        self._due: dict[int, list[Place]] = {}  # per unfinished plan: what it computes and the tree has already
        self._paged = [g for g, group in enumerate(self.groups) if group.spec.kind != "recurrent"]
        self._windows = [g for g, group in enumerate(self.groups) if group.spec.kind == "window"]

    @property
    def only_full(self) -> bool:
        """Whether every group keeps all positions."""
        return len(self._paged) == len(self.groups) and not self._windows

    def _on_idle(self, block: int) -> None:
        self.tree.on_idle(block)

    @property
    def num_available(self) -> int:
        return self.pool.num_free + self.pool.num_idle

    def blocks_to(self, length: int, chunk: int = 1) -> int:
        """The most blocks one sequence of `length` holds at once when it computes `chunk` positions a step."""
        return sum(
            group.blocks_per_state
            if group.spec.kind == "recurrent"
            else group.spec.blocks_at_most(length, chunk, self.block_size)
            for group in self.groups
        )

    def match(self, salt: Hashable, tokens: Sequence[int]) -> int:
        """How many positions of `tokens` could be taken from the cache. The last one never is: it must be computed."""
        return len(self._path(salt, tokens)) * self.block_size

    def chain(self, salt: Hashable, tokens: Sequence[int]) -> int:
        """What stands for the positions that `match` counts."""
        path = self._path(salt, tokens)
        return path[-1].chain if path else self.tree.chain_of_root(salt)

    def _path(self, salt: Hashable, tokens: Sequence[int]) -> list[Node]:
        if not self.enable_prefix_caching or not self.groups:
            return []
        asked, self._asked = self._asked, None
        if asked is None or asked[0] is not tokens or asked[1:4] != (len(tokens), salt, self.tree.version):
            path = self.tree.match(salt, tokens, len(tokens) - 1, self._in_common(asked, salt, tokens))
            asked = (tokens, len(tokens), salt, self.tree.version, path[: self.tree.usable(path)])
        self._asked = asked
        return asked[4]

    def _in_common(self, asked: Asked | None, salt: Hashable, tokens: Sequence[int]) -> list[Node]:
        """The path of another that begins in the same way, as those that come together often do."""
        if asked is None or asked[2:4] != (salt, self.tree.version):
            return []
        length = len(asked[4]) * self.block_size
        return asked[4] if length < len(tokens) and asked[0][:length] == tokens[:length] else []

    def attach(self, salt: Hashable, tokens: Sequence[int]) -> tuple[Holding, int]:
        """A holding that starts with the longest usable cached prefix, and that prefix's length.

        A recurrent group resumes from a copy of the snapshot; its blocks come with the first `grow`.
        """
        path = self._path(salt, tokens)
        holding = self._empty(salt)
        self.tree.touch(path)
        size = self.block_size
        for g in self._paged:
            first = self.groups[g].spec.first_needed(len(path) * size) // size
            holding.first[g] = first
            blocks = [slot[0] for node in path[first:] if (slot := node.slots[g]) is not None]
            self.pool.share_all(blocks)
            holding.tables[g] = [ABSENT] * first + blocks
            holding.changed[g] = dict(enumerate(blocks, start=first))
        for g in self.recurrent if path else ():
            slot = path[-1].slots[g]
            assert slot is not None
            holding.resume[g] = slot
            for block in slot:
                self.pool.share(block)
        holding.num_inserted = len(path)
        if self.enable_prefix_caching and self.groups:
            holding.node = path[-1] if path else self.tree.root(salt)
            self.tree.pin(holding.node)
        return holding, len(path) * size

    def _empty(self, salt: Hashable) -> Holding:
        count = len(self.groups)
        return Holding(salt, [[] for _ in range(count)], [{} for _ in range(count)], [0] * count)

    def fork(self, parent: Holding, position: int, at_end: bool) -> Holding | None:
        """A second holding of the parent's first `position` positions, sharing its blocks until one of the two writes.

        `at_end` says that the parent's state is exactly at `position`, as a recurrent group needs. None where the
        parent no longer has what the child must read.
        """
        if self.recurrent and not (at_end and self.ensure(self.state_blocks)):
            return None
        size = self.block_size
        count = -(-position // size)
        for g in self._paged:
            if parent.first[g] > self.groups[g].spec.first_needed(position) // size:
                return None
        parent.steady_until = 0
        child = self._empty(parent.salt)
        child.plan = parent.plan
        for g in self._paged:
            child.first[g] = parent.first[g]
            child.tables[g] = [ABSENT] * parent.first[g]
            for index in range(parent.first[g], count):
                block = parent.tables[g][index]
                self.pool.share(block)
                self._enter(child, g, index, block)
        for g in self.recurrent:
            for index, block in enumerate(parent.tables[g]):
                fresh = self.pool.take()
                self._enter(child, g, index, fresh)
                self._copy(block, fresh, child)
        child.num_inserted = min(parent.num_inserted, position // size)
        if parent.node is not None:
            node = parent.node
            for _ in range(parent.num_inserted - child.num_inserted):
                assert node.parent is not None
                node = node.parent
            child.node = node
            self.tree.pin(node)
        return child

    @property
    def state_blocks(self) -> int:
        """Blocks that the recurrent states of one sequence fill."""
        return sum(self.groups[g].blocks_per_state for g in self.recurrent)

    def needed(self, holding: Holding, start: int, end: int) -> int:
        """How many free blocks computing positions [start, end) takes."""
        total = 0
        blocks_at_end = -(-end // self.block_size)
        for g in self._paged:
            table = holding.tables[g]
            total += max(0, blocks_at_end - len(table)) + len(self._shared(table, start))
        for g in self.recurrent:
            total += self.groups[g].blocks_per_state - len(holding.tables[g])
        return total

    def _shared(self, table: list[int], start: int) -> list[int]:
        """Table entries at or after `start` whose block has another owner: they are copied before they are written."""
        return [index for index in range(start // self.block_size, len(table)) if self.pool.refs[table[index]] > 1]

    def ensure(self, num_blocks: int) -> bool:
        """Evict until `num_blocks` are free. False leaves some evicted and not enough free."""
        return self.pool.num_free >= num_blocks or self.tree.evict(num_blocks)

    def grow(self, holding: Holding, start: int, end: int, plan: int) -> None:
        """Own alone every block that computing positions [start, end) in `plan` writes. Call `ensure` first."""
        holding.plan = plan
        blocks_at_end = -(-end // self.block_size)
        for g in self._paged:
            table = holding.tables[g]
            for index in self._shared(table, start):
                shared, table[index] = table[index], self.pool.take()
                holding.changed[g][index] = table[index]
                self._copy(shared, table[index], holding)
                self.pool.release(shared, plan)
            for index in range(len(table), blocks_at_end):
                self._enter(holding, g, index, self.pool.take())
        for g in self.recurrent:
            if not holding.tables[g]:
                self._start_state(holding, g, plan)

    def _start_state(self, holding: Holding, g: int, plan: int) -> None:
        for index in range(self.groups[g].blocks_per_state):
            self._enter(holding, g, index, self.pool.take())
        for source, target in zip(holding.resume.pop(g, ()), holding.tables[g]):
            self._copy(source, target, holding)
            self.pool.release(source, plan)

    def _enter(self, holding: Holding, g: int, index: int, block: int) -> None:
        holding.tables[g].append(block)
        holding.changed[g][index] = block

    def _copy(self, source: int, target: int, holding: Holding) -> None:
        self.copies.append(Copy(source, target, holding))
        self.num_copied += 1

    def exclusive(self, holding: Holding) -> int:
        """How many blocks only this holding keeps in use."""
        own = 0
        for g, table in enumerate(holding.tables):
            own += sum(1 for block in table[holding.first[g] :] if self.pool.num_users(block) == 1)
        return own

    def held(self, holding: Holding) -> int:
        return sum(len(table) - first for table, first in zip(holding.tables, holding.first))

    def snapshot(self, holding: Holding, position: int, plan: int) -> None:
        """Keep a copy of the recurrent states as they are at `position`, before `plan`, if blocks are to be had."""
        if not self.enable_prefix_caching or not self.ensure(self.state_blocks):
            return
        for g in self.recurrent:
            blocks = []
            for block in holding.tables[g]:
                blocks.append(self.pool.take())
                self._copy(block, blocks[-1], holding)
            holding.snapshots.append(Snapshot(position, g, tuple(blocks), plan))

    def trim(self, holding: Holding, position: int) -> None:
        """Give up what no query at `position` or later reads."""
        for g in self._windows:
            table, first = holding.tables[g], holding.first[g]
            keep = min(len(table), self.groups[g].spec.first_needed(position) // self.block_size)
            for index in range(first, keep):
                self.pool.release(table[index], holding.plan)
                table[index] = ABSENT
                holding.changed[g].pop(index, None)
            holding.first[g] = max(first, keep)

    def insert(self, holding: Holding, tokens: Sequence[int], computed: int, plan: int | None = None) -> None:
        """Put the whole blocks among the first `computed` positions into the tree; `plan`, if it has not ended, is the
        last that computes some of them.

        Where the tree already has a block for the same tokens, that one is used from now on and ours is given up.
        """
        if holding.node is None:
            return
        size, previous, node = self.block_size, holding.node, holding.node
        if (holding.num_inserted + 1) * size > computed:
            return
        for index in range(holding.num_inserted, computed // size):
            node = self.tree.extend(node, key_of(holding.salt, tokens, index * size, size))
            for g in self._paged:
                if self._offer_block(holding, node, g, index) and plan is not None:
                    self._due.setdefault(plan, []).append((node, g))
        holding.num_inserted, holding.node = computed // size, node
        self.tree.pin(node)
        self.tree.unpin(previous)

    def _offer_block(self, holding: Holding, node: Node, g: int, index: int) -> bool:
        """Whether the tree took it."""
        ours, theirs = holding.tables[g][index], node.slots[g]
        if ours == ABSENT:
            return False
        if theirs is None:
            self.tree.hold(node, g, (ours,))
            return True
        if theirs[0] != ours:
            self.pool.share(theirs[0])
            self.pool.release(ours, holding.plan)
            holding.tables[g][index] = holding.changed[g][index] = theirs[0]
            holding.steady_until = 0
        return False

    def end(self, plan: int) -> None:
        """What a plan put into the tree is computed now, or is about to be taken back."""
        self._due.pop(plan, None)

    def uncomputed(self, holding: Holding | None = None) -> list[Place]:
        """What unfinished plans put into the tree, or those parts of it that rely on what is on this holding's path;
        with all that stands behind it."""
        due = [place for places in self._due.values() for place in places]
        if holding is not None:
            path = set(_upwards(holding.node))
            first = {node for node, _ in due if node in path}
            due = [place for place in due if not first.isdisjoint(_upwards(place[0]))]
        return self.tree.behind(due)

    def owns_any(self, holding: Holding, blocks: Set[int]) -> bool:
        return any(not blocks.isdisjoint(table) for table in holding.tables)

    def keep_snapshots(self, holding: Holding, plan: int) -> None:
        """`plan` has ended: its snapshots go to the tree, before `insert` moves on from where they were taken."""
        if not holding.snapshots:
            return
        for snapshot in [s for s in holding.snapshots if s.plan <= plan]:
            node = holding.node
            if (
                node is not None
                and snapshot.position == holding.num_inserted * self.block_size
                and node.slots[snapshot.group] is None
            ):
                self.tree.hold(node, snapshot.group, snapshot.blocks)
            self.pool.release_all(snapshot.blocks, snapshot.plan)
            holding.snapshots.remove(snapshot)

    def release(self, holding: Holding) -> None:
        """Give everything up; what is in the tree stays there until it is evicted."""
        for g, table in enumerate(holding.tables):
            self.pool.release_all(reversed(table[holding.first[g] :]), holding.plan)
            table.clear()
        for snapshot in holding.snapshots:
            self.pool.release_all(snapshot.blocks, snapshot.plan)
        holding.snapshots.clear()
        for blocks in holding.resume.values():
            self.pool.release_all(blocks, holding.plan)
        holding.resume.clear()
        self.copies = [copy for copy in self.copies if copy.holding is not holding]
        if holding.node is not None:
            self.tree.unpin(holding.node)
            holding.node = None

    def changes(self, holding: Holding) -> tuple[dict[int, int], ...]:
        """The table entries of each group that the device has not been told of, and from now on has been."""
        if not any(holding.changed):
            return ()
        changed = tuple(holding.changed)
        holding.changed = [{} for _ in changed]
        return changed

    def check(self, holdings: Sequence[Holding]) -> None:
        """Every block's owners are exactly the tree and the holdings that list it."""
        self.pool.check()
        self.tree.check()
        owners = [0] * self.pool.num_blocks
        for node in self.tree.nodes():
            for slot in node.slots:
                for block in slot or ():
                    owners[block] += 1
        for holding in holdings:
            for table in holding.tables:
                for block in table:
                    if block != ABSENT:
                        owners[block] += 1
            for blocks in [s.blocks for s in holding.snapshots] + list(holding.resume.values()):
                for block in blocks:
                    owners[block] += 1
        if any(plan <= self.pool.ended for plan in self._due):
            raise AssertionError("a plan that has ended is to compute something still")
        if owners != self.pool.refs:
            wrong = [b for b in range(len(owners)) if owners[b] != self.pool.refs[b]]
            raise AssertionError(f"blocks {wrong[:8]} have other owners than are counted")
        pins = sum(node.pins for node in self.tree.nodes())
        if pins != sum(1 for holding in holdings if holding.node is not None):
            raise AssertionError("a node stays pinned by nobody")


def _upwards(node: Node | None) -> Iterator[Node]:
    """A node and those above it."""
    while node is not None:
        yield node
        node = node.parent
