"""Digests of prompt blocks, equal in every process that has the key, and the blocks that an engine was sent lately."""

from __future__ import annotations

import hashlib
import secrets
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import count

BLOCK_TOKENS = 16
MAX_BLOCKS = 4096  # digested per prompt
DIGEST_BYTES = 12
MIN_KNOWN_TOKENS = 8192
_turns = count(1)
PROCESS_KEY = secrets.token_bytes(32)  # clients cannot make two prompts collide


def digest_blocks(root: Iterable[object], tokens: Sequence[int], key: bytes = PROCESS_KEY) -> tuple[bytes, ...]:
    """Digest the prompt's full blocks; each digest covers `root` and all blocks before it."""
    return digest_parts(root, array("I", tokens[: MAX_BLOCKS * BLOCK_TOKENS]).tobytes(), 4 * BLOCK_TOKENS, key)


def digest_parts(root: Iterable[object], data: bytes, size: int, key: bytes = PROCESS_KEY) -> tuple[bytes, ...]:
    """Digest the whole parts of `size` bytes; each digest covers `root` and all parts before it."""
    digest, digests = _digest(repr(tuple(root)).encode(), key), []
    for begin in range(0, min(len(data), MAX_BLOCKS * size) - size + 1, size):
        digest = _digest(digest + data[begin : begin + size], key)
        digests.append(digest)
    return tuple(digests)


def _digest(data: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=key).digest()


class SentPrefixes:
    """Blocks that were sent lately, least recently used first; it forgets when the cache would."""

    def __init__(self, max_blocks: int = MIN_KNOWN_TOKENS // BLOCK_TOKENS) -> None:
        self._known: OrderedDict[Hashable, int] = OrderedDict()  # with the turn of its last use
        self.max_blocks = max_blocks

    def __len__(self) -> int:
        return len(self._known)

    def reset(self, max_blocks: int) -> None:
        """Forget all: a new engine starts empty."""
        self.clear()
        self.max_blocks = max(1, max_blocks)

    def clear(self) -> None:
        self._known.clear()

    @property
    def fill(self) -> float:
        """Return how full the memory is, from 0 to 1."""
        return min(1.0, len(self._known) / self.max_blocks)

    @property
    def oldest_turn(self) -> int:
        """Return when the block that is forgotten next was used, by a count that all share."""
        return next(iter(self._known.values()), 0)

    def count(self, digests: Sequence[Hashable]) -> int:
        """Count the known blocks at the beginning of a prompt."""
        return bisect_left(digests, True, key=lambda digest: digest not in self._known)

    def add(self, digests: Sequence[Hashable]) -> None:
        turn = next(_turns)
        for digest in reversed(digests):  # forget no block before its successors
            self._known[digest] = turn
            self._known.move_to_end(digest)
        while len(self._known) > self.max_blocks:
            self._known.popitem(last=False)
