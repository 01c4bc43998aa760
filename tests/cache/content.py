"""A cache with remembered contents: what each block holds is written down beside it, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.cache.group import Group, StateSpec
from penstock.cache.holding import Holding
from penstock.cache.kv import KVCache
from penstock.cache.radix import Node, Root

FULL = Group(StateSpec("full", bytes_per_position=1), (0,))
WINDOW = Group(StateSpec("window", bytes_per_position=1, window=5), (1,))
STATE = Group(StateSpec("recurrent", num_rows=4, row_bytes=2), (2,), blocks_per_state=2)

Prefix = tuple[str, tuple[int, ...]]  # a salt and tokens


@dataclass(eq=False)
class Writer:
    """A sequence as the cache knows it."""

    holding: Holding
    salt: str
    tokens: list[int]
    computed: int
    snapshots: int = field(default=0)

    def prefix(self, length: int) -> Prefix:
        return self.salt, tuple(self.tokens[:length])


class Content:
    """Runs writers on a KVCache one step at a time; every read is compared with what was written."""

    def __init__(self, num_blocks: int, block_size: int, groups: Sequence[Group], caching: bool = True) -> None:
        self.cache = KVCache(num_blocks, block_size, groups, caching)
        self.slots: list[dict[int, Prefix]] = [{} for _ in range(num_blocks)]
        self.plan = 0

    def begin(self, salt: str, tokens: Sequence[int]) -> Writer:
        holding, hit = self.cache.attach(Root(salt), tokens)
        return Writer(holding, salt, list(tokens), hit)

    def advance(self, writer: Writer, count: int, snapshot: bool = False) -> bool:
        """Compute the next `count` positions; False if there are no blocks for them."""
        cache, holding = self.cache, writer.holding
        start, end = writer.computed, writer.computed + count
        if not cache.ensure(cache.count_needed(holding, start, end)):
            return False
        has_state = bool(cache.recurrent and holding.tables[cache.recurrent[0]])
        cache.grow(holding, start, end, self.plan)
        if snapshot and has_state and start % cache.block_size == 0:
            cache.snapshots.take(holding, start, self.plan)
            writer.snapshots += 1
        self._copy()
        for g in range(len(cache.groups)):
            self._compute(writer, g, start, end)
        cache.pool.end(self.plan)
        writer.computed = end
        cache.snapshots.keep(holding, self.plan)
        cache.insert(holding, writer.tokens, end)
        cache.trim(holding, end)
        self.plan += 1
        return True

    def fork(self, writer: Writer, position: int, tokens: Sequence[int]) -> Writer | None:
        """Another that continues the writer's first `position` tokens with its own."""
        holding = self.cache.fork(writer.holding, position, at_end=position == writer.computed)
        if holding is None:
            return None
        self._copy()
        return Writer(holding, writer.salt, writer.tokens[:position] + list(tokens), position)

    def _copy(self) -> None:
        for copy in self.cache.copies.pending:
            self.slots[copy.target] = dict(self.slots[copy.source])
        self.cache.copies.take()

    def _compute(self, writer: Writer, g: int, start: int, end: int) -> None:
        size, table = self.cache.block_size, writer.holding.tables[g]
        spec = self.cache.groups[g].spec
        if spec.kind == "recurrent":
            for part, block in enumerate(table):
                assert start == 0 or self.slots[block].get(part) == writer.prefix(start), "a wrong state"
                assert self.cache.pool.refs[block] == 1
                self.slots[block] = {part: writer.prefix(end)}
            return
        for position in range(start, end):
            block = table[position // size]
            assert self.cache.pool.refs[block] == 1, "a shared block is written"
            self.slots[block][position % size] = writer.prefix(position + 1)
        for position in range(spec.find_first_needed(start), end):
            found = self.slots[table[position // size]].get(position % size)
            assert found == writer.prefix(position + 1), "a wrong block"

    def held(self) -> dict[Prefix, list[bool]]:
        """What the tree holds: for each path, which groups have something there."""
        found: dict[Prefix, list[bool]] = {}
        roots: dict[Any, Node] = self.cache.tree._roots
        stack: list[tuple[Any, Any, Node]] = [(root.salt, (), node) for root, node in roots.items()]
        while stack:
            salt, tokens, node = stack.pop()
            if tokens:
                found[salt, tokens] = [slot is not None for slot in node.slots]
            stack += [(salt, tokens + key, child) for key, child in node.children.items()]
        return found

    def longest(self, salt: str, tokens: Sequence[int]) -> int:
        """The longest prefix that can be resumed after, position by position from the definitions."""
        held, size = self.held(), self.cache.block_size
        best = 0
        for length in range(size, len(tokens), size):
            if (salt, tuple(tokens[:length])) not in held:
                break
            if all(self._resumable(held, salt, tokens, length, g) for g in range(len(self.cache.groups))):
                best = length
        return best

    def _resumable(self, held: dict[Prefix, list[bool]], salt: str, tokens: Sequence[int], length: int, g: int) -> bool:
        spec, size = self.cache.groups[g].spec, self.cache.block_size
        if spec.kind == "recurrent":
            return held[salt, tuple(tokens[:length])][g]
        first = 0 if spec.kind == "full" else max(0, length - spec.window + 1)
        blocks = {position // size for position in range(first, length)}
        return all(held[salt, tuple(tokens[: (block + 1) * size])][g] for block in blocks)
