"""Sequences that begin with the same blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.runner.cuda.decode_batch import PrefixFinder, SharedPrefix, fill_shared, max_tiles

BLOCK = 16


class Known:
    """What the host knows of a row, as far as it matters here."""

    def __init__(self, table: list[int]) -> None:
        self.tables = [np.array(table, dtype=np.int32)]


def step(*tables: list[int]) -> tuple[list[int], list[Any]]:
    """One row for each table, at the last position that its blocks hold."""
    return [len(table) * BLOCK - 1 for table in tables], [Known(table) for table in tables]


def test_groups_are_as_long_as_what_all_have_in_common() -> None:
    common = list(range(100, 120))
    alike = ([*common, 1000 + i, 2000 + i] for i in range(5))
    found = PrefixFinder(BLOCK).find(*step(*alike, list(range(300, 340)), [*common[:18], 7, 8]))
    assert found == [SharedPrefix((0, 1, 2, 3, 4, 6), 18 * BLOCK)]


def test_few_sequences_and_short_prefixes_are_not_worth_it() -> None:
    assert PrefixFinder(BLOCK).find(*step(*([*range(20), 50 + i] for i in range(3)))) == []
    assert PrefixFinder(BLOCK).find(*step(*([*range(9), *range(50 + 20 * i, 62 + 20 * i)] for i in range(6)))) == []


def test_the_block_that_is_being_written_is_nobodys_prefix() -> None:
    starts, devices = step(*([list(range(20))] * 4))
    assert PrefixFinder(BLOCK).find(starts, devices) == [SharedPrefix((0, 1, 2, 3), 19 * BLOCK)]


def test_other_rows_are_looked_at_again() -> None:
    prefixes = PrefixFinder(BLOCK)
    starts, devices = step(*([*range(20), 50 + i] for i in range(4)))
    first = prefixes.find(starts, devices)
    assert first and prefixes.find(starts, devices) is first
    assert prefixes.find(*step(*(list(range(30 * i, 30 * i + 21)) for i in range(4)))) == []


def test_tiles_cover_every_member_once() -> None:
    groups = [SharedPrefix((0, 2, 3, 5, 6), 320), SharedPrefix((1, 4, 7, 8), 256)]
    members, skips = np.empty(16, np.int32), np.empty(16, np.int32)
    tiles = np.empty((max_tiles(16, 2), 4), np.int32)
    fill_shared(groups, 2, members, skips, tiles)
    assert skips[:9].tolist() == [320, 256, 320, 320, 256, 320, 320, 256, 256] and not skips[9:].any()
    used = [tile for tile in tiles.tolist() if tile[1]]
    covered = [members[first : first + count].tolist() for first, count, _, _ in used]
    assert covered == [[0, 2], [3, 5], [6], [1, 4], [7, 8]]
    assert [(whose, length) for _, _, whose, length in used] == [(0, 320)] * 3 + [(1, 256)] * 2
