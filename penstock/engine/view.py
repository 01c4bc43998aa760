"""The live view of an engine: its rows and blocks. Nothing is kept while there is no viewer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import msgspec

from penstock.engine.sequence import Sequence, Status

if TYPE_CHECKING:
    from penstock.cache.kv import KVCache
    from penstock.engine.engine import Engine

MAX_ROWS = 512
MAX_CELLS = 2_000
MAX_EVICTIONS = 20_000  # kept between two looks
LATELY = 4  # looks for which an evicted block is marked
MAX_SHARE = 0.005  # of the time that making maps may take
FREE, HELD, CACHED, SHARED, EVICTED = range(5)  # a cell's byte


class RowView(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One sequence. `computed` are positions whose state is in the cache."""

    request_id: str
    sibling: int
    state: str  # queued, prefill, decode, preempted
    computed: int
    cached: int
    output: int
    preemptions: int


class BlockView(msgspec.Struct, frozen=True):
    """The block pool: counts that add up to `num`, and a byte per cell of so many blocks."""

    num: int
    block_size: int
    free: int
    held: int  # by one sequence
    cached: int  # by the prefix cache alone
    shared: int  # by two or more sequences
    evicted: int  # since the engine began
    cells: bytes
    blocks_per_cell: int


class Viewer:
    """Answers looks until told that there is no viewer any more."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine, self._clock = engine, clock
        self._cells, self._due_s, self._num_shared = b"", 0.0, 0
        self._evicted: deque[set[int]] = deque(maxlen=LATELY)

    def list_rows(self) -> list[RowView]:
        """List sequences, running ones first."""
        roster = self._engine.scheduler.roster
        shown = [*roster.running[:MAX_ROWS], *roster.waiting[: max(0, MAX_ROWS - len(roster.running))]]
        return [_describe_row(sequence) for sequence in shown]

    def describe_blocks(self) -> BlockView:
        cache = self._engine.scheduler.cache
        pool, size = cache.pool, _cell_size(cache.pool.num_blocks)
        if pool.evictions is None:
            pool.evictions = deque(maxlen=MAX_EVICTIONS)
        self._evicted.append(set(pool.evictions))
        pool.evictions.clear()
        begin_s = self._clock()
        if begin_s >= self._due_s:
            self._make_map(cache, size)
            end_s = self._clock()
            self._due_s = end_s + (end_s - begin_s) / MAX_SHARE  # a pool of a million blocks is drawn less often
        return BlockView(
            pool.num_blocks,
            cache.block_size,
            pool.num_free + pool.num_limbo,
            pool.num_used - (num_shared := min(self._num_shared, pool.num_used)),
            pool.num_idle,
            num_shared,
            cache.tree.num_evicted,
            self._cells,
            size,
        )

    def stop(self) -> None:
        """Keep nothing from now on: there is no viewer."""
        self._engine.scheduler.cache.pool.evictions = None
        self._evicted.clear()
        self._cells, self._due_s = b"", 0.0

    def _make_map(self, cache: KVCache, size: int) -> None:
        pool = cache.pool
        users, cached = pool.list_states()
        self._num_shared = len(users) - users.count(0) - users.count(1)
        cells = bytearray(_code_cell(users, cached, at, size) for at in range(0, pool.num_blocks, size))
        for blocks in self._evicted:
            for block in blocks:
                cells[block // size] = EVICTED
        self._cells = bytes(cells)


def _cell_size(num_blocks: int) -> int:
    return max(1, -(-num_blocks // MAX_CELLS))


def _code_cell(users: Seq[int], cached: Seq[bool], at: int, size: int) -> int:
    """Code blocks by the one that is in use most."""
    most = max(users[at : at + size])
    if most > 0:
        return SHARED if most > 1 else HELD
    return CACHED if any(cached[at : at + size]) else FREE


def _describe_row(sequence: Sequence) -> RowView:
    if sequence.status is Status.RUNNING:
        state = "prefill" if sequence.settled < sequence.num_prompt else "decode"
    else:
        state = "preempted" if sequence.num_preempted else "queued"
    return RowView(
        sequence.request.id,
        sequence.sibling,
        state,
        min(sequence.settled, len(sequence.tokens)),
        sequence.num_cached or 0,
        sequence.num_output,
        sequence.num_preempted,
    )
