"""Which sequences of a step begin with the same blocks, so that a device may read those once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.runner.rows import DeviceRow

LEAST_SEQUENCES = 4
LEAST_POSITIONS = 256
MOST_GROUPS = 8


@dataclass(frozen=True)
class Group:
    members: tuple[int, ...]  # places in the step
    num_positions: int


class Prefixes:
    """What was found for the last step holds for the next one of the same rows: blocks are only added to them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._key: tuple[object, ...] = ()
        self._groups: list[Group] = []

    def find(self, starts: Sequence[int], devices: Sequence[DeviceRow]) -> list[Group]:
        """The groups of a step of single tokens at these positions, in a cache of one block table."""
        if len(starts) < LEAST_SEQUENCES:
            return []
        key = tuple(devices)
        if key != self._key:
            self._key, self._groups = key, self._search(starts, devices)
        return self._groups

    def _search(self, starts: Sequence[int], devices: Sequence[DeviceRow]) -> list[Group]:
        by_first: dict[int, list[int]] = {}
        for s, (start, device) in enumerate(zip(starts, devices)):
            if start >= LEAST_POSITIONS:
                by_first.setdefault(device.tables[0].item(0), []).append(s)
        groups: list[Group] = []
        for members in by_first.values():
            if len(members) >= LEAST_SEQUENCES and len(groups) < MOST_GROUPS:
                shortest = min(starts[s] for s in members) // self._block_size
                tables = np.stack([devices[s].tables[0][:shortest] for s in members])
                differing = np.flatnonzero((tables != tables[0]).any(axis=0))
                common = int(differing[0] if len(differing) else shortest) * self._block_size
                if common >= LEAST_POSITIONS:
                    groups.append(Group(tuple(members), common))
        return groups


def fill(groups: Sequence[Group], tile_tokens: int, members: np.ndarray, skips: np.ndarray, tiles: np.ndarray) -> None:
    """Members one group after the other, how many positions each sequence skips, and tiles [n, 4]: first member, how
    many, whose block table, how many positions."""
    skips[:], tiles[:], members[:] = 0, 0, 0
    first = tile = 0
    for group in groups:
        count = len(group.members)
        members[first : first + count] = group.members
        skips[list(group.members)] = group.num_positions
        for begin in range(0, count, tile_tokens):
            tiles[tile] = first + begin, min(tile_tokens, count - begin), group.members[0], group.num_positions
            tile += 1
        first += count


def num_tiles(num_sequences: int, tile_tokens: int) -> int:
    """The most there can be."""
    return -(-num_sequences // tile_tokens) + MOST_GROUPS
