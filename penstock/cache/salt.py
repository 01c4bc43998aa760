"""Within what a prefix is shared: a salt of its own, or everybody for its beginning and the salt from there on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

EVERYBODY = ""


@dataclass(frozen=True)
class Salt:
    """The first `num_public` positions are shared with everybody."""

    text: str
    num_public: int

    def first_private(self, block_size: int) -> int:
        """Where the first block begins that is not wholly public."""
        return self.num_public - self.num_public % block_size


def root_of(salt: Hashable) -> Hashable:
    return EVERYBODY if isinstance(salt, Salt) else salt


def key_of(salt: Hashable, tokens: Sequence[int], start: int, block_size: int) -> tuple[Hashable, ...]:
    """What stands for the block at `start` in the tree: its tokens, and the salt where the private part begins."""
    key = tokens[start : start + block_size]
    if type(key) is not tuple:
        key = tuple(key)
    if isinstance(salt, Salt) and start == salt.first_private(block_size):
        return (*key, salt.text)
    return key
