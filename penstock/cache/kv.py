"""The cache as the scheduler sees it: match a prefix, grow by a few positions, give everything back."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.cache.group import Group
from penstock.cache.holding import ABSENT, MIN_STRIDE, CopyQueue, Holding, Snapshots, choose_stride, make_holding
from penstock.cache.pool import BlockPool
from penstock.cache.radix import Node, PrefixLookup, RadixCache, Root, chain_hash
from penstock.cache.restore import Restorer
from penstock.cache.store import Loads, Offloading, Saves
from penstock.cache.uncomputed import Uncomputed


class KVCache:
    """One pool, one tree, one table per group. Policy (who may have blocks) is the caller's."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Sequence[Group],
        enable_prefix_caching: bool = True,
        min_snapshot_stride: int = MIN_STRIDE,
        offloading: Offloading | None = None,
    ) -> None:
        """`offloading`: a store that keeps blocks outside the pool; nothing of it is used without prefix caching."""
        self.block_size = block_size
        self.groups = tuple(groups)
        self.enable_prefix_caching = enable_prefix_caching and bool(groups)
        self.pool = BlockPool(num_blocks, lambda block: self.tree.on_idle(block))
        self.tree = RadixCache(self.pool, self.groups, block_size)
        self.copies = CopyQueue()
        self.snapshots = Snapshots(self.pool, self.tree, self.copies)
        self.snapshot_stride = choose_stride(self.groups, block_size, min_snapshot_stride)
        self.uncomputed = Uncomputed(self.tree)
        self.recurrent = [g for g, group in enumerate(self.groups) if not group.is_paged]
        self.loads = Loads(self.pool, self.tree)
        self.saves: Saves | None = None
        self._restorer: Restorer | None = None
        if offloading is not None and self.enable_prefix_caching:
            self.saves = Saves(self.tree, self.uncomputed, offloading)
            self._restorer = Restorer(self.tree, self.snapshots, self.uncomputed, self.loads, offloading)
        self._lookup = PrefixLookup(self.tree)
        self._paged = [g for g, group in enumerate(self.groups) if group.is_paged]
        self._windows = [g for g, group in enumerate(self.groups) if group.spec.kind == "window"]

    @property
    def only_full(self) -> bool:
        """True if every group keeps all positions."""
        return len(self._paged) == len(self.groups) and not self._windows

    @property
    def num_available(self) -> int:
        return self.pool.num_free + self.pool.num_idle

    def blocks_to(self, length: int, chunk: int = 1) -> int:
        """Bound the blocks that one sequence of `length` holds at once when it computes `chunk` positions a step."""
        return self.snapshots.state_blocks + sum(
            group.spec.max_blocks(length + group.ahead, chunk + group.ahead, self.block_size)
            for group in self.groups
            if group.is_paged
        )

    def match(self, root: Root, tokens: Sequence[int]) -> int:
        """Count the positions of `tokens` that are cached. The last one never is: it must be computed."""
        return len(self._find_path(root, tokens)) * self.block_size

    def chain(self, root: Root, tokens: Sequence[int]) -> int:
        """Return the chain hash of the prefix that `match` counts."""
        path = self._find_path(root, tokens)
        return path[-1].chain if path else chain_hash(0, (root.base,))

    def _find_path(self, root: Root, tokens: Sequence[int]) -> list[Node]:
        return self._lookup.find(root, tokens) if self.enable_prefix_caching else []

    def attach(self, root: Root, tokens: Sequence[int], plan: int | None = None) -> tuple[Holding, int]:
        """Make a holding that starts with the longest usable cached prefix, and return that prefix's length. What the
        store has beyond it is part of it, loaded by `plan`, which is being made.

        A recurrent group resumes from a copy of the snapshot; its blocks come with the first `grow`.
        """
        path = self._find_path(root, tokens)
        holding = make_holding(root, len(self.groups))
        if plan is not None and self._restorer is not None and tokens:
            in_tree = len(path)
            path = self._restorer.restore(root, tokens, path, plan)
            holding.num_restored = (len(path) - in_tree) * self.block_size
        self.tree.touch(path)
        size = self.block_size
        for g in self._paged:
            first = self.groups[g].spec.find_first_needed(len(path) * size) // size
            holding.first[g] = first
            blocks = [slot[0] for node in path[first:] if (slot := node.slots[g]) is not None]
            self.pool.share_all(blocks)
            holding.tables[g] = [ABSENT] * first + blocks
            holding.changed[g] = dict(enumerate(blocks, start=first))
        for g in self.recurrent if path else ():
            slot = path[-1].slots[g]
            assert slot is not None
            holding.resume[g] = slot
            self.pool.share_all(slot)
        holding.num_inserted = len(path)
        if self.enable_prefix_caching:
            holding.node = path[-1] if path else self.tree.root(root)
            self.tree.pin(holding.node)
        return holding, len(path) * size

    def fork(self, parent: Holding, position: int, at_end: bool) -> Holding | None:
        """Make a second holding of the parent's first `position` positions, sharing blocks until one of them writes.

        `at_end` says that the parent's state is exactly at `position`, as a recurrent group needs. None where the
        parent no longer has what the child must read.
        """
        if self.recurrent and not (at_end and self.ensure(self.snapshots.state_blocks)):
            return None
        size = self.block_size
        count = -(-position // size)
        if any(parent.first[g] > self.groups[g].spec.find_first_needed(position) // size for g in self._paged):
            return None
        parent.steady_until = 0
        child = make_holding(parent.root, len(self.groups))
        child.plan = parent.plan
        for g in self._paged:
            child.first[g] = parent.first[g]
            child.tables[g] = [ABSENT] * parent.first[g]
            for block in parent.tables[g][parent.first[g] : count]:
                self.pool.share(block)
                child.append(g, block)
        self.snapshots.fork(parent, child)
        child.num_inserted = min(parent.num_inserted, position // size)
        if parent.node is not None:
            node = parent.node
            for _ in range(parent.num_inserted - child.num_inserted):
                assert node.parent is not None
                node = node.parent
            child.node = node
            self.tree.pin(node)
        return child

    def count_needed(self, holding: Holding, start: int, end: int) -> int:
        """Count the free blocks that computing positions [start, end) takes."""
        total = 0
        for g in self._paged:
            table = holding.tables[g]
            total += max(0, self._blocks_at(g, end) - len(table)) + len(self._find_shared(table, start))
        for g in self.recurrent:
            total += self.groups[g].blocks_per_state - len(holding.tables[g])
        return total

    def _blocks_at(self, g: int, end: int) -> int:
        """Count the blocks of group `g` that positions below `end` and the group's drafts fill."""
        return -(-(end + self.groups[g].ahead) // self.block_size)

    def _find_shared(self, table: list[int], start: int) -> list[int]:
        """List table entries at or after `start` whose block has another owner: copy them before they are written."""
        return [index for index in range(start // self.block_size, len(table)) if self.pool.refs[table[index]] > 1]

    def ensure(self, num_blocks: int) -> bool:
        """Evict until `num_blocks` are free. False leaves some evicted and not enough free."""
        return self.tree.evict(num_blocks)

    def grow(self, holding: Holding, start: int, end: int, plan: int) -> None:
        """Make the holding the only owner of every block that computing positions [start, end) in `plan` writes.
        Call `ensure` first."""
        holding.plan = plan
        for g in self._paged:
            table = holding.tables[g]
            for index in self._find_shared(table, start):
                shared, table[index] = table[index], self.pool.take()
                holding.changed[g][index] = table[index]
                self.copies.add(shared, table[index], holding)
                self.pool.release(shared, plan)
            for _ in range(len(table), self._blocks_at(g, end)):
                holding.append(g, self.pool.take())
        self.snapshots.start(holding, plan)

    def count_exclusive(self, holding: Holding) -> int:
        """Count the blocks that only this holding keeps in use."""
        tables = zip(holding.tables, holding.first)
        return sum(self.pool.num_users(block) == 1 for table, first in tables for block in table[first:])

    def trim(self, holding: Holding, position: int) -> None:
        """Give up blocks that no query at `position` or later reads."""
        for g in self._windows:
            table, first = holding.tables[g], holding.first[g]
            keep = min(len(table), self.groups[g].spec.find_first_needed(position) // self.block_size)
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
        size, previous = self.block_size, holding.node
        if previous is None or (holding.num_inserted + 1) * size > computed:
            return
        node = previous
        for index in range(holding.num_inserted, computed // size):
            node = self.tree.extend(node, holding.root.key(tokens, index * size, size))
            for g in self._paged:
                if self._offer_block(holding, node, g, index) and plan is not None:
                    self.uncomputed.add(plan, (node, g))
        holding.num_inserted, holding.node = computed // size, node
        self.tree.pin(node)
        self.tree.unpin(previous)

    def _offer_block(self, holding: Holding, node: Node, g: int, index: int) -> bool:
        """Return True if the tree took the block."""
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

    def release(self, holding: Holding) -> None:
        """Give everything up; what is in the tree stays there until it is evicted."""
        for g, table in enumerate(holding.tables):
            self.pool.release_all(reversed(table[holding.first[g] :]), holding.plan)
            table.clear()
        self.snapshots.release(holding)
        self.copies.drop(holding)
        if holding.node is not None:
            self.tree.unpin(holding.node)
            holding.node = None

    def check(self, holdings: Sequence[Holding]) -> None:
        """Assert that every block's owners are exactly the tree and the holdings that list it."""
        self.pool.check()
        self.tree.check()
        owners = [0] * self.pool.num_blocks
        lists = [slot for node in self.tree.nodes() for slot in node.slots if slot]
        for holding in holdings:
            lists += [tuple(table[first:]) for table, first in zip(holding.tables, holding.first)]
            lists += [s.blocks for s in holding.snapshots] + list(holding.resume.values())
        for block in (block for blocks in lists for block in blocks):
            owners[block] += 1
        self.uncomputed.check(self.pool.ended)
        self.snapshots.check(holdings)
        if owners != self.pool.refs:
            wrong = [b for b in range(len(owners)) if owners[b] != self.pool.refs[b]]
            raise AssertionError(f"blocks {wrong[:8]} have other owners than are counted")
        if self.loads.pending:
            raise AssertionError("loads are left over from a plan that was not made")
        pins = sum(node.pins for node in self.tree.nodes())
        if pins != sum(1 for holding in holdings if holding.node is not None):
            raise AssertionError("a node stays pinned by no holding")
