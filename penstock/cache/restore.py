"""Extend prefixes from the store: blocks beyond a path's end in the tree join the tree, and a plan loads them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.cache.holding import Snapshots
from penstock.cache.radix import Node, RadixCache, Root
from penstock.cache.store import Loads, Offloading, name_slot
from penstock.cache.uncomputed import Uncomputed


class Restorer:
    def __init__(
        self, tree: RadixCache, snapshots: Snapshots, uncomputed: Uncomputed, loads: Loads, offloading: Offloading
    ) -> None:
        self._tree, self._snapshots, self._uncomputed, self._loads = tree, snapshots, uncomputed, loads
        self._names, self._store = offloading.names, offloading.store
        self._full = [g for g, group in enumerate(tree.groups) if group.spec.kind == "full"]
        self._last: tuple[Root, Sequence[int], dict[int, bytes]] | None = None  # and digests of its blocks

    def restore(self, root: Root, tokens: Sequence[int], path: list[Node], plan: int) -> list[Node]:
        """Return a longer path than `path`, the tree's own, if the store has more of `tokens`; `plan` loads it."""
        size, tree = self._tree.block_size, self._tree
        most = (len(tokens) - 1) // size
        if most <= len(path):
            return path
        known = path if len(self._full) == len(tree.groups) else tree.match(root, tokens, len(tokens) - 1, path)
        digests = self._find_digests(root, tokens, known, most)
        longest, wanted = self._find_missing(known, digests)
        if longest <= len(path):
            return path
        last = known[-1] if known else tree.root(root)
        tree.pin(last)
        if self._make_room(known, wanted):
            path = self._extend(root, tokens, [*known], digests, longest)
            for index, g in sorted(wanted):
                slot = self._loads.add((path[index], g), name_slot(digests[index], g))
                self._uncomputed.add(plan, (path[index], g))
                self._snapshots.note(path[index], g, slot)
        tree.unpin(last)
        return path

    def _extend(
        self, root: Root, tokens: Sequence[int], nodes: list[Node], digests: dict[int, bytes], length: int
    ) -> list[Node]:
        """Add nodes until there are `length`, or drop those beyond."""
        size = self._tree.block_size
        for index in range(len(nodes), length):
            node = nodes[-1] if nodes else self._tree.root(root)
            nodes.append(self._tree.extend(node, root.key(tokens, index * size, size)))
            nodes[-1].digest = digests[index]
        return nodes[:length]

    def _find_digests(
        self, root: Root, tokens: Sequence[int], known: Sequence[Node], max_blocks: int
    ) -> dict[int, bytes]:
        """Return the digests of the blocks, as far as the store may have some; none if this root has no names."""
        if self._last is None or self._last[0] != root or self._last[1] is not tokens:
            self._last = root, tokens, {}
        digests, size = self._last[2], self._tree.block_size
        last = self._names.of(known[-1]) if known else self._names.start(root)
        if last is None:
            return {}
        for index, node in enumerate(known):
            digests[index] = self._names.of(node) or b""
        for index in range(len(known), max_blocks):
            if index not in digests:
                digests[index] = self._names.extend(last, root.key(tokens, index * size, size))
            last = digests[index]
            if any(not self._store.has(name_slot(last, g)) for g in self._full):
                return {i: digests[i] for i in range(index)}
        return {i: digests[i] for i in range(max_blocks)}

    def _find_missing(self, known: Sequence[Node], digests: dict[int, bytes]) -> tuple[int, set[tuple[int, int]]]:
        """Return the longest usable prefix in blocks, and the blocks and groups of it that the tree does not hold."""
        groups, size = self._tree.groups, self._tree.block_size
        held = [[i < len(known) and known[i].slots[g] is not None for i in digests] for g in range(len(groups))]
        verdicts = []
        for g, group in enumerate(groups):
            present = [held[g][i] or self._store.has(name_slot(digests[i], g)) for i in digests]
            verdicts.append(group.spec.find_resumable(present, size))
        longest = max((i + 1 for i, accepted in enumerate(zip(*verdicts)) if all(accepted)), default=0)
        wanted = set()
        for g, group in enumerate(groups):
            first = group.spec.find_first_needed(longest * size) // size if group.is_paged else max(0, longest - 1)
            wanted |= {(i, g) for i in range(first, longest) if not held[g][i]}
        return longest, wanted

    def _make_room(self, known: Sequence[Node], wanted: set[tuple[int, int]]) -> bool:
        """Free the blocks that the loads take, but none of what stands on the known path."""
        groups, pool = self._tree.groups, self._tree.pool
        kept = [block for node in known for slot in node.slots for block in slot or ()]
        pool.share_all(kept)
        try:
            is_recurrent = any(not groups[g].is_paged for _, g in wanted)
            if is_recurrent and not self._snapshots.make_room():
                return False
            return self._tree.evict(sum(groups[g].blocks_per_state for _, g in wanted))
        finally:
            pool.release_all(kept)
