"""The warp that copies queries, keys and values to shared memory."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from penstock.ops.triton.attention.hopper.tiles import (
    HALF,
    NUM,
    ROWS,
    SIZE,
    STAGES,
    count_blocks,
    count_rounds,
    find_rows,
    find_tile,
)

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the latter in Triton 3.6


class CacheRows(NamedTuple):
    """Rows of SIZE values from one block of the cache to the next, and from one head to the next."""

    k_block: int
    k_head: int
    v_block: int
    v_head: int


@gluon.jit
def _copy_queries(q_desc, buffers, bars, row, group, done, PACK: gl.constexpr):
    """Copy a tile's queries, as two halves of 64 columns for each warpgroup."""
    q_ready, q_empty = bars[0], bars[1]
    for part in gl.static_range(2):
        mbarrier.wait(q_empty.index(part), done & 1 ^ 1)
        mbarrier.expect(q_ready.index(part), ROWS * SIZE * 2)
        for half in gl.static_range(2):
            at = [row + part * (ROWS // PACK), group * PACK, half * HALF]
            async_load(q_desc, at, q_ready.index(part), buffers.index(part * 2 + half))


@gluon.jit
def _copy_keys(desc, buffers, ready, empty, table, row, begin, block_rows, last, counter, P: gl.constexpr):
    """Copy NUM keys or values from position `begin` to the buffer of `counter`, as two halves of 64 columns. After the
    sequence's last block they are its last block's again."""
    stage, phase = counter % STAGES, counter // STAGES & 1
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(ready.index(stage), NUM * SIZE * 2)
    for page in gl.static_range(NUM // P):
        block = gl.load(table + gl.minimum(begin // P + page, last))
        for half in gl.static_range(2):
            buffer = buffers.index((stage * 2 + half) * (NUM // P) + page)
            async_load(desc, [row + block * block_rows, half * HALF], ready.index(stage), buffer)


@gluon.jit
def produce(descs, buffers, bars, work, rows, num_tiles, table_row, P: gl.constexpr, PACK: gl.constexpr):
    """Copy queries, keys and values of every tile of this program, key blocks from the last to the first."""
    q_desc, k_desc, v_desc = descs
    q_buffers, k_buffers, v_buffers = buffers
    _, _, k_ready, k_empty, v_ready, v_empty = bars
    counter = 0
    for turn in range(count_rounds(work, num_tiles)):
        s, first_query, group = find_tile(work, num_tiles, turn)
        begin, count, length = find_rows(work, s)
        table = work.table + s.to(gl.int64) * table_row
        _copy_queries(q_desc, q_buffers, bars, begin + first_query, group, turn, PACK)
        k_row, v_row = group * rows.k_head, group * rows.v_head
        blocks = count_blocks(length - count + first_query, length, PACK)
        last = gl.maximum(length - 1, 0) // P
        for n in range(blocks + 1):
            if n < blocks:
                at, place = (blocks - 1 - n) * NUM, counter + n
                _copy_keys(k_desc, k_buffers, k_ready, k_empty, table, k_row, at, rows.k_block, last, place, P)
            if n > 0:
                at, place = (blocks - n) * NUM, counter + n - 1
                _copy_keys(v_desc, v_buffers, v_ready, v_empty, table, v_row, at, rows.v_block, last, place, P)
        counter += blocks
