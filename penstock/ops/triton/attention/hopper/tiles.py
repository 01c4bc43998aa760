"""Tiles of queries, and the order in which programs take them; copying and computing warps must agree on it."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SIZE = gl.constexpr(128)  # of a head
ROWS = gl.constexpr(64)  # of a warpgroup: queries times query heads per KV head
HALF = gl.constexpr(64)  # columns: a swizzled line of 128 bytes
NUM = gl.constexpr(128)  # keys at once
STAGES = gl.constexpr(2)  # blocks of keys in flight, and of values


class Tiles(NamedTuple):
    """Tiles [n, 2] of a step, the sequence and its first query of each, and where the sequences lie."""

    tiles: Any
    count: Any  # pointer to the number of tiles that have queries, which come first; None if all have
    query_start: Any
    lengths: Any
    table: Any
    num_groups: int  # of heads that share a tile


@gluon.jit
def count_rounds(work, num_tiles):
    """Return how many tiles this program computes; odd rounds go backwards, which evens out the longest-first order."""
    total, programs, mine = num_tiles * work.num_groups, gl.num_programs(0), gl.program_id(0)
    rounds = total // programs
    last = gl.where(rounds % 2 == 0, mine, programs - 1 - mine)
    return rounds + gl.where(last < total - rounds * programs, 1, 0)


@gluon.jit
def find_tile(work, num_tiles, turn):
    """Return the sequence, its first query and the group of heads of this program's tile in round `turn`; some tile if
    there is none."""
    programs, mine = gl.num_programs(0), gl.program_id(0)
    num_tiles = gl.maximum(num_tiles, 1)
    at = turn * programs + gl.where(turn % 2 == 0, mine, programs - 1 - mine)
    at = gl.minimum(at, num_tiles * work.num_groups - 1)
    tile = at % num_tiles
    return gl.load(work.tiles + 2 * tile), gl.load(work.tiles + 2 * tile + 1), at // num_tiles


@gluon.jit
def find_rows(work, s):
    """Return the first row, number of queries and length of a sequence."""
    begin = gl.load(work.query_start + s)
    return begin, gl.load(work.query_start + s + 1) - begin, gl.load(work.lengths + s)


@gluon.jit
def count_blocks(first, length, PACK: gl.constexpr):
    """Return how many blocks of keys a tile reads whose first query is at position `first`. A tile without queries
    reads one: a warp that waits for keys gets some."""
    end = gl.minimum(length, first + 2 * ROWS // PACK)
    return gl.maximum((end + NUM - 1) // NUM, 1)
