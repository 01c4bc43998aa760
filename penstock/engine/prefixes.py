"""Prompt blocks that running sequences are about to compute, so that later arrivals wait for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock.cache.radix import chained
from penstock.cache.salt import Salt, key_of
from penstock.engine.sequence import Sequence


class PendingPrefixes:
    """Keys are hashes: a collision makes a sequence wait a little, never share a wrong block."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._keys: Counter[int] = Counter()

    def announce(self, sequence: Sequence) -> None:
        """The sequence runs and will compute its prompt from `computed` on."""
        holding = sequence.held
        if holding.node is None:
            return
        keys = self._keys_after(sequence, holding.num_inserted, holding.node.chain)
        sequence.keys = list(keys)[sequence.computed // self.block_size - holding.num_inserted :]
        self._keys.update(sequence.keys)

    def progress(self, sequence: Sequence, inserted: int) -> None:
        """Blocks up to `inserted` are in the tree now."""
        count = len(sequence.keys) - max(0, len(sequence.request.tokens) // self.block_size - inserted)
        for key in sequence.keys[: max(0, count)]:
            self._forget(key)
        del sequence.keys[: max(0, count)]

    def withdraw(self, sequence: Sequence) -> None:
        for key in sequence.keys:
            self._forget(key)
        sequence.keys = []

    def awaited(self, sequence: Sequence, hit: int, chain: int) -> bool:
        """Whether the block after the first `hit` positions, for which `chain` stands, is being computed by someone
        else."""
        index = hit // self.block_size
        if not self._keys or (index + 1) * self.block_size > len(sequence.request.tokens) - 1:
            return False
        sequence.awaits = next(self._keys_after(sequence, index, chain))
        return sequence.awaits in self._keys

    def still_awaited(self, sequence: Sequence) -> bool:
        """Whether the block that it was last said to wait for is still being computed."""
        return sequence.awaits in self._keys

    def _keys_after(self, sequence: Sequence, num_blocks: int, chain: int) -> Iterator[int]:
        """A key per whole block of the prompt after the first `num_blocks`, each over everything before it."""
        tokens, size, salt = sequence.request.tokens, self.block_size, sequence.salt
        salted = isinstance(salt, Salt)
        for start in range(num_blocks * size, len(tokens) - size + 1, size):
            chain = chained(chain, key_of(salt, tokens, start, size) if salted else tokens[start : start + size])
            yield chain

    def _forget(self, key: int) -> None:
        self._keys[key] -= 1
        if not self._keys[key]:
            del self._keys[key]
