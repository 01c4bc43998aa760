"""Prompt blocks that running sequences are about to compute, so that later arrivals wait for them."""

from __future__ import annotations

from collections import Counter

from penstock.cache.salt import Salt, key_of, root_of
from penstock.engine.sequence import Sequence


class PendingPrefixes:
    """Keys are hashes: a collision makes a sequence wait a little, never share a wrong block."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._keys: Counter[int] = Counter()

    def announce(self, sequence: Sequence) -> None:
        """The sequence runs and will compute its prompt from `computed` on."""
        sequence.keys = self._chain(sequence)[sequence.computed // self.block_size:]
        self._keys.update(sequence.keys)

    def progress(self, sequence: Sequence, inserted: int) -> None:
        """Blocks up to `inserted` are in the tree now."""
        total = len(sequence.request.tokens) // self.block_size
        while sequence.keys and total - len(sequence.keys) < inserted:
            self._forget(sequence.keys.pop(0))

    def withdraw(self, sequence: Sequence) -> None:
        for key in sequence.keys:
            self._forget(key)
        sequence.keys = []

    def awaited(self, sequence: Sequence, hit: int) -> bool:
        """Whether the block after the first `hit` positions is being computed by someone else."""
        index = hit // self.block_size
        if not self._keys or (index + 1) * self.block_size > len(sequence.request.tokens) - 1:
            return False
        sequence.awaits = self._chain(sequence)[index]
        return sequence.awaits in self._keys

    def still_awaited(self, sequence: Sequence) -> bool:
        """Whether the block that it was last said to wait for is still being computed."""
        return sequence.awaits in self._keys

    def _chain(self, sequence: Sequence) -> list[int]:
        """A key per whole block of the prompt, each over everything before it."""
        if sequence.chain is None:
            tokens, size, salt = sequence.request.tokens, self.block_size, sequence.salt
            salted = isinstance(salt, Salt)
            key, chain = hash(root_of(salt)), []
            for start in range(0, len(tokens) - size + 1, size):
                key = hash((key, key_of(salt, tokens, start, size) if salted else tokens[start:start + size]))
                chain.append(key)
            sequence.chain = chain
        return sequence.chain

    def _forget(self, key: int) -> None:
        self._keys[key] -= 1
        if not self._keys[key]:
            del self._keys[key]
