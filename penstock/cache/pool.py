"""Block ids with reference counts. A block released while a started plan may still touch it waits for that plan."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """`take` a block with one owner, `share` it with another, `release` it. Knows nothing of tokens."""

    def __init__(self, num_blocks: int, on_idle: Callable[[int], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._busy = [-1] * num_blocks  # the last plan that names the block
        self.ended = -1  # every plan up to this one has ended
        self._limbo: dict[int, list[int]] = {}
        self.num_limbo = 0  # blocks without an owner that wait for a started plan to end
        self._cached = [False] * num_blocks  # the tree is one of the owners
        self.num_idle = 0  # blocks that only the tree owns
        self.evictions: deque[int] | None = None  # blocks that left the tree, while someone watches
        self._on_idle = on_idle

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - self.num_limbo - self.num_idle

    def num_users(self, block: int) -> int:
        """Owners other than the tree."""
        return self.refs[block] - self._cached[block]

    def list_states(self) -> tuple[list[int], list[bool]]:
        """Return each block's owners other than the tree, and if the tree is one."""
        return list(map(operator.sub, self.refs, self._cached)), self._cached

    def take(self) -> int:
        block = self._free.pop()
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        self.share_all((block,))

    def share_all(self, blocks: Sequence[int]) -> None:
        refs, cached = self.refs, self._cached
        for block in blocks:
            if refs[block] == 1 and cached[block]:
                self.num_idle -= 1
            elif refs[block] < 1:
                raise RuntimeError(f"block {block} has no owner to share it")
            refs[block] += 1

    def release(self, block: int, after: int = -1) -> None:
        """Give up one ownership; `after` is the last plan in which that owner named the block."""
        if self.refs[block] < 1:
            raise RuntimeError(f"block {block} is released more often than it was taken")
        if after > self._busy[block]:
            self._busy[block] = after
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self._return(block)
        elif self.refs[block] == 1 and self._cached[block]:
            self.num_idle += 1
            if self._on_idle:
                self._on_idle(block)

    def release_all(self, blocks: Iterable[int], after: int = -1) -> None:
        """Release each block, in this order."""
        refs, busy, cached = self.refs, self._busy, self._cached
        for block in blocks:
            if refs[block] <= 2 and (refs[block] < 2 or cached[block]):
                self.release(block, after)
                continue
            if after > busy[block]:
                busy[block] = after
            refs[block] -= 1

    def mark_busy(self, blocks: Iterable[int], plan: int) -> None:
        """Keep blocks from another owner until `plan` has ended."""
        for block in blocks:
            self._busy[block] = max(self._busy[block], plan)

    def cache(self, block: int) -> None:
        """Make the tree an owner."""
        self.share(block)
        self._cached[block] = True

    def uncache(self, block: int) -> None:
        """Take the block from the tree, its only owner."""
        if not self._cached[block] or self.refs[block] != 1:
            raise RuntimeError(f"block {block} is evicted while it is in use")
        self._cached[block] = False
        self.num_idle -= 1
        self.release(block)
        if self.evictions is not None:
            self.evictions.append(block)

    def end(self, plan: int) -> None:
        """Free the blocks that waited for `plan` or an earlier one."""
        self.ended = plan
        for number in [number for number in self._limbo if number <= plan]:
            blocks = self._limbo.pop(number)
            self.num_limbo -= len(blocks)
            self._free.extend(blocks)

    def _return(self, block: int) -> None:
        if self._busy[block] > self.ended:
            self._limbo.setdefault(self._busy[block], []).append(block)
            self.num_limbo += 1
        else:
            self._free.append(block)

    def check(self) -> None:
        limbo = [block for blocks in self._limbo.values() for block in blocks]
        unowned = self._free + limbo
        if len(set(unowned)) != len(unowned) or any(self.refs[block] for block in unowned):
            raise AssertionError("a block is free twice or free and owned")
        if len(limbo) != self.num_limbo:
            raise AssertionError("limbo is miscounted")
        if sum(1 for count in self.refs if count > 0) + len(unowned) != self.num_blocks:
            raise AssertionError("a block is lost")
        idle = sum(1 for block in range(self.num_blocks) if self._cached[block] and self.refs[block] == 1)
        if idle != self.num_idle:
            raise AssertionError(f"{self.num_idle} idle blocks are counted, {idle} exist")
