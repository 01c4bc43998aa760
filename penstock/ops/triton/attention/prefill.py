"""Prefill attention on Hopper: one warp copies keys and values by TMA, two warpgroups of 64 query rows compute.

Keys and values come from the paged cache, or from rows of one tensor where a whole prompt's are at hand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOG2_E = 1.4426950408889634
MIN_SCORE = gl.constexpr(-1e30)  # under any score
HALF = gl.constexpr(64)  # bfloat16 values of a swizzled line of 128 bytes, and rows of a warpgroup
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the latter in Triton 3.6
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # Triton 3.6 has it underlined


class Tiles(NamedTuple):
    """Tiles [n, 2] of a step, the sequence and its first query of each, and where the sequences lie."""

    tiles: Any
    query_start: Any
    lengths: Any
    kv_start: Any  # of dense keys: the row of a sequence's position 0
    table: Any
    num_groups: int  # of heads that share a tile


class Rows(NamedTuple):
    """The place of keys and values in their descriptors: rows per block and per head."""

    k_block: int
    k_head: int
    v_block: int
    v_head: int


@gluon.jit
def _reinterpret(buffer, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    if HAS_REINTERPRET:
        view = buffer.reinterpret(buffer.dtype, SHAPE, LAYOUT)
    else:
        view = buffer._reinterpret(buffer.dtype, SHAPE, LAYOUT)
    return view


@gluon.jit
def _num_rounds(work, num_tiles):
    """Return how many tiles this program computes; odd rounds go backwards, which evens out the longest-first order."""
    total, programs, mine = num_tiles * work.num_groups, gl.num_programs(0), gl.program_id(0)
    rounds = total // programs
    last = gl.where(rounds % 2 == 0, mine, programs - 1 - mine)
    return rounds + gl.where(last < total - rounds * programs, 1, 0)


@gluon.jit
def _find_tile(work, num_tiles, turn, HEADS_FIRST: gl.constexpr):
    """Return the sequence, its first query and the group of heads of this program's tile in round `turn`."""
    programs, mine = gl.num_programs(0), gl.program_id(0)
    at = turn * programs + gl.where(turn % 2 == 0, mine, programs - 1 - mine)
    at = gl.minimum(at, num_tiles * work.num_groups - 1)
    if HEADS_FIRST:
        tile, group = at // work.num_groups, at % work.num_groups
    else:
        tile, group = at % num_tiles, at // num_tiles
    return gl.load(work.tiles + 2 * tile), gl.load(work.tiles + 2 * tile + 1), group


@gluon.jit
def _find_rows(work, s):
    """Return the first row, number of queries and length of a sequence."""
    begin = gl.load(work.query_start + s)
    return begin, gl.load(work.query_start + s + 1) - begin, gl.load(work.lengths + s)


@gluon.jit
def _copy_keys(
    desc,
    buffers,
    ready,
    empty,
    table,
    row,
    column,
    begin,
    block_rows,
    length,
    counter,
    P: gl.constexpr,
    NUM: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copy NUM keys or values from position `begin` to the buffer of `counter`, as two halves of 64 columns."""
    stage, phase = counter % STAGES, counter // STAGES & 1
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(ready.index(stage), NUM * 2 * HALF * 2)
    if P == 0:
        for half in gl.static_range(2):
            async_load(desc, [row + begin, column + half * HALF], ready.index(stage), buffers.index(stage * 2 + half))
    else:
        last = (length - 1) // P
        for page in gl.static_range(NUM // P):
            at = gl.minimum(begin // P + page, last)
            block = gl.load(table + at)
            for half in gl.static_range(2):
                async_load(
                    desc,
                    [row + block * block_rows, column + half * HALF],
                    ready.index(stage),
                    buffers.index((stage * 2 + half) * (NUM // P) + page),
                )


@gluon.jit
def _produce(
    descs,
    buffers,
    bars,
    work,
    rows,
    num_tiles,
    table_row,
    P: gl.constexpr,
    PACK: gl.constexpr,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    NUM: gl.constexpr,
    STAGES: gl.constexpr,
    HEADS_FIRST: gl.constexpr,
):
    """Copy queries, keys and values of every tile of this program, key blocks from the last to the first."""
    q_desc, k_desc, v_desc = descs
    q_buffers, k_buffers, v_buffers = buffers
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, _ = bars
    counter = 0
    for turn in range(_num_rounds(work, num_tiles)):
        s, first_query, group = _find_tile(work, num_tiles, turn, HEADS_FIRST)
        begin, count, length = _find_rows(work, s)
        kv_row = gl.load(work.kv_start + s)
        table = work.table + s.to(gl.int64) * table_row
        for part in gl.static_range(2):
            mbarrier.wait(q_empty.index(part), turn & 1 ^ 1)
            mbarrier.expect(q_ready.index(part), HALF * SIZE * 2)
            for half in gl.static_range(2):
                async_load(
                    q_desc,
                    [begin + first_query + part * (HALF // PACK), group * PACK, half * HALF],
                    q_ready.index(part),
                    q_buffers.index(part * 2 + half),
                )
        h = group * PACK // GROUP
        if P == 0:
            k_row, v_row, column = kv_row, kv_row, h * SIZE
        else:
            k_row, v_row, column = h * rows.k_head, h * rows.v_head, h * 0
        end = gl.minimum(length, length - count + first_query + 2 * HALF // PACK)
        blocks = (end + NUM - 1) // NUM
        for n in range(blocks + 1):
            if n < blocks:
                _copy_keys(
                    k_desc,
                    k_buffers,
                    k_ready,
                    k_empty,
                    table,
                    k_row,
                    column,
                    (blocks - 1 - n) * NUM,
                    rows.k_block,
                    length,
                    counter + n,
                    P,
                    NUM,
                    STAGES,
                )
            if n > 0:
                _copy_keys(
                    v_desc,
                    v_buffers,
                    v_ready,
                    v_empty,
                    table,
                    v_row,
                    column,
                    (blocks - n) * NUM,
                    rows.v_block,
                    length,
                    counter + n - 1,
                    P,
                    NUM,
                    STAGES,
                )
        counter += blocks


@gluon.jit
def _soften(scores, top, total, factor, j, position, MASKED: gl.constexpr):
    """Return the weights of some scores in an online softmax, what is kept of older sums, maximum and total."""
    if MASKED:
        scores = gl.where(j[None, :] <= position[:, None], scores, float("-inf"))
    now = gl.maximum(top, gl.max(scores, 1) * factor)
    p = gl.exp2(scores * factor - now[:, None])
    kept = gl.exp2(top - now)
    return p, kept, now, total * kept + gl.sum(p, 1)


@gluon.jit
def _hold(total):
    """Return a total of weights, computed here: a store that never happens keeps ptxas from moving the wait for the
    tensor cores before the weights, which would leave them idle meanwhile."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $1, 0f00000000; "
        "@p st.volatile.shared.f32 [a], $1; mov.b32 $0, $1; }",
        "=f,f",
        [total],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _multiply(
    q, p, sums, keys, values, bars, n, turn, part: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr
):
    """Start the scores of key block n and the sums of block n - 1. PINGPONG lets the warpgroups take turns."""
    _, _, k_ready, _, v_ready, _, turns = bars
    if PINGPONG:
        step = n - 1 - turn  # the first block of a tile takes no turn
        mbarrier.wait(turns.index(part), (step & 1) ^ (1 - part))
    mbarrier.wait(k_ready.index(n % STAGES), n // STAGES & 1)
    NUM: gl.constexpr = keys.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NUM, 16])
    nothing = gl.zeros([HALF, NUM], gl.float32, SCORES)
    scores = warpgroup_mma(q, keys.index(n % STAGES).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index((n - 1) % STAGES), (n - 1) // STAGES & 1)
    sums = warpgroup_mma(p, values.index((n - 1) % STAGES), sums, is_async=True)
    if PINGPONG:
        mbarrier.arrive(turns.index(1 - part), count=1)
    return scores, sums


@gluon.jit
def _step(
    q,
    p,
    top,
    total,
    sums,
    keys,
    values,
    bars,
    n,
    turn,
    j,
    position,
    factor,
    part: gl.constexpr,
    STAGES: gl.constexpr,
    MASKED: gl.constexpr,
    PINGPONG: gl.constexpr,
    WEIGHTS: gl.constexpr,
):
    """Weigh key block n while the tensor cores add block n - 1."""
    _, _, _, k_empty, _, v_empty, _ = bars
    scores, sums = _multiply(q, p, sums, keys, values, bars, n, turn, part, STAGES, PINGPONG)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_empty.index(n % STAGES), count=1)
    weights, kept, top, total = _soften(scores, top, total, factor, j, position, MASKED)
    weights = gl.convert_layout(weights.to(p.dtype), WEIGHTS)
    total = _hold(total)
    # The wait takes the new weights too: else the compiler would compute them after it.
    sums, p, weights = warpgroup_mma_wait(0, deps=(sums, p, weights))
    mbarrier.arrive(v_empty.index((n - 1) % STAGES), count=1)
    kept = gl.convert_layout(kept, gl.SliceLayout(1, sums.type.layout))
    return weights, top, total, sums * kept[:, None]


@gluon.jit
def _clear_values(values, num_valid, NUM: gl.constexpr):
    """Zero the values past a sequence's end: a weight of 0 does not hide a NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, NUM, gl.SliceLayout(1, LAYOUT))
    x = values.load(LAYOUT)
    values.store(gl.where((row < num_valid)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def _consume(
    views,
    bars,
    work,
    out,
    factor,
    num_heads,
    num_tiles,
    part: gl.constexpr,
    PACK: gl.constexpr,
    SIZE: gl.constexpr,
    NUM: gl.constexpr,
    STAGES: gl.constexpr,
    HEADS_FIRST: gl.constexpr,
    PINGPONG: gl.constexpr,
    CLEAR: gl.constexpr,
):
    """Compute 64 rows of every tile of this program."""
    queries, keys, values = views
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, _ = bars
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NUM, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    r = part * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
    column = gl.arange(0, NUM, gl.SliceLayout(0, SCORES))
    out_r = part * HALF + gl.arange(0, HALF, gl.SliceLayout(1, OUT))
    out_d = gl.arange(0, SIZE, gl.SliceLayout(0, OUT))
    q = queries.index(part)
    counter = 0
    rounds = _num_rounds(work, num_tiles)
    s, first_query, group = _find_tile(work, num_tiles, 0, HEADS_FIRST)
    begin, count, length = _find_rows(work, s)
    next_s, next_query, next_group = _find_tile(work, num_tiles, 1, HEADS_FIRST)
    for turn in range(rounds):
        next_begin, next_count, next_length = _find_rows(work, next_s)
        later_s, later_query, later_group = _find_tile(work, num_tiles, turn + 2, HEADS_FIRST)
        first = length - count + first_query
        position = first + r // PACK
        blocks = (gl.minimum(length, first + 2 * HALF // PACK) + NUM - 1) // NUM
        masked = blocks - (first + 1) // NUM  # key blocks that some query sees in part
        top = gl.full([HALF], MIN_SCORE, gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, SCORES))
        sums = gl.zeros([HALF, SIZE], gl.float32, SUMS)
        mbarrier.wait(q_ready.index(part), turn & 1)
        mbarrier.wait(k_ready.index(counter % STAGES), counter // STAGES & 1)
        scores = warpgroup_mma(
            q,
            keys.index(counter % STAGES).permute((1, 0)),
            gl.zeros([HALF, NUM], gl.float32, SCORES),
            use_acc=False,
            is_async=True,
        )
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(counter % STAGES), count=1)
        weights, kept, top, total = _soften(scores, top, total, factor, (blocks - 1) * NUM + column, position, True)
        p = gl.convert_layout(weights.to(out.dtype.element_ty), WEIGHTS)
        if CLEAR:  # noqa: SIM102  one at compile time, one at run time
            if blocks * NUM > length:
                mbarrier.wait(v_ready.index(counter % STAGES), counter // STAGES & 1)
                _clear_values(values.index(counter % STAGES), length - (blocks - 1) * NUM, NUM)
        for n in range(1, gl.minimum(gl.maximum(masked, 1), blocks)):
            j = (blocks - 1 - n) * NUM + column
            p, top, total, sums = _step(
                q,
                p,
                top,
                total,
                sums,
                keys,
                values,
                bars,
                counter + n,
                turn,
                j,
                position,
                factor,
                part,
                STAGES,
                True,
                PINGPONG,
                WEIGHTS,
            )
        for n in range(gl.maximum(masked, 1), blocks):
            p, top, total, sums = _step(
                q,
                p,
                top,
                total,
                sums,
                keys,
                values,
                bars,
                counter + n,
                turn,
                column,
                position,
                factor,
                part,
                STAGES,
                False,
                PINGPONG,
                WEIGHTS,
            )
        mbarrier.arrive(q_empty.index(part), count=1)
        counter += blocks
        at = (counter - 1) % STAGES
        mbarrier.wait(v_ready.index(at), (counter - 1) // STAGES & 1)
        sums = warpgroup_mma(p, values.index(at), sums, is_async=True)
        sums, p = warpgroup_mma_wait(0, deps=(sums, p))
        mbarrier.arrive(v_empty.index(at), count=1)
        total = gl.convert_layout(total, gl.SliceLayout(1, SUMS))
        y = gl.convert_layout((sums / total[:, None]).to(out.dtype.element_ty), OUT)
        token = first_query + out_r // PACK
        row = (begin + token).to(gl.int64) * num_heads + group * PACK + out_r % PACK
        gl.store(out + (row * SIZE)[:, None] + out_d[None, :], y, mask=(token < count)[:, None])
        s, first_query, group = next_s, next_query, next_group
        begin, count, length = next_begin, next_count, next_length
        next_s, next_query, next_group = later_s, later_query, later_group


@gluon.jit(do_not_specialize=["num_tiles", "table_row"])
def _prefill_hopper(
    q_desc,
    k_desc,
    v_desc,
    work,
    rows,
    out,
    factor,
    num_heads,
    num_tiles,
    table_row,
    P: gl.constexpr,  # positions of a block, 0 for dense keys
    PACK: gl.constexpr,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    NUM: gl.constexpr,
    STAGES: gl.constexpr,
    HEADS_FIRST: gl.constexpr,
    PINGPONG: gl.constexpr,
    CLEAR: gl.constexpr,
):
    """Tiles of 128 rows: 128 // PACK queries of one sequence, for PACK heads of one KV head."""
    DTYPE: gl.constexpr = q_desc.dtype
    COPY: gl.constexpr = NUM if P == 0 else P  # rows of one TMA copy
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_buffers = gl.allocate_shared_memory(DTYPE, [4, HALF // PACK, PACK, HALF], gl.NVMMASharedLayout(128, 16, 3))
    k_buffers = gl.allocate_shared_memory(DTYPE, [STAGES * 2 * (NUM // COPY), COPY, HALF], FLAT)
    v_buffers = gl.allocate_shared_memory(DTYPE, [STAGES * 2 * (NUM // COPY), COPY, HALF], FLAT)
    queries = _reinterpret(q_buffers, [2, HALF, SIZE], FLAT)
    keys = _reinterpret(k_buffers, [STAGES, NUM, SIZE], FLAT)
    values = _reinterpret(v_buffers, [STAGES, NUM, SIZE], FLAT)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)  # both warpgroups
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    bars = (q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, turns)
    buffers = (q_buffers, k_buffers, v_buffers)
    views = (queries, keys, values)
    descs = (q_desc, k_desc, v_desc)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    views,
                    bars,
                    work,
                    out,
                    factor,
                    num_heads,
                    num_tiles,
                    0,
                    PACK,
                    SIZE,
                    NUM,
                    STAGES,
                    HEADS_FIRST,
                    PINGPONG,
                    CLEAR,
                ),
            ),
            (
                _consume,
                (
                    views,
                    bars,
                    work,
                    out,
                    factor,
                    num_heads,
                    num_tiles,
                    1,
                    PACK,
                    SIZE,
                    NUM,
                    STAGES,
                    HEADS_FIRST,
                    PINGPONG,
                    CLEAR,
                ),
            ),
            (
                _produce,
                (
                    descs,
                    buffers,
                    bars,
                    work,
                    rows,
                    num_tiles,
                    table_row,
                    P,
                    PACK,
                    GROUP,
                    SIZE,
                    NUM,
                    STAGES,
                    HEADS_FIRST,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


def describe(base: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """Return a TMA descriptor of some of a tensor's elements."""
    return TensorDescriptor(base, shape, strides, block, gl.NVMMASharedLayout(128, 16, len(block)))


def pack_heads(group: int) -> int:
    """Return how many query heads of a KV head share a tile: a power of two, as TMA boxes are."""
    return min(8, group & -group)


def attend_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    query_start: Tensor,
    lengths: Tensor,
    kv_start: Tensor,
    tiles: Tensor,
    scale: float,
    num_programs: int,
    pack: int = 0,
    num: int = 128,
    stages: int = 2,
    heads_first: bool = False,
    pingpong: bool = False,
    clear: bool = True,
) -> Tensor:
    """Attend with q[T, H, D] over a cache k[N, K, D, P], v[N, K, P, D], or over rows k, v[T, K, D] without a table."""
    num_tokens, num_heads, size = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    pack = pack or pack_heads(group)
    out = torch.empty((num_tokens, num_heads, size), dtype=q.dtype, device=q.device)
    q_desc = describe(q, [num_tokens, num_heads, size], [q.stride(0), size, 1], [64 // pack, pack, 64])
    if table is None:
        width = num_kv_heads * size
        k_desc, v_desc = (describe(x, [x.shape[0], width], [x.stride(0), 1], [num, 64]) for x in (k, v))
        rows, block_size, table, table_row = Rows(0, 0, 0, 0), 0, query_start, 0
    else:
        block_size, table_row = v.shape[2], table.stride(0)
        row_counts = [(x.shape[0] - 1) * x.stride(0) // size + num_kv_heads * block_size for x in (k, v)]
        k_desc, v_desc = (describe(x, [n, size], [size, 1], [block_size, 64]) for x, n in zip((k, v), row_counts))
        rows = Rows(k.stride(0) // size, k.stride(1) // size, v.stride(0) // size, v.stride(1) // size)
    num_tiles, num_groups = len(tiles), num_heads // pack
    work = Tiles(tiles, query_start, lengths, kv_start, table, num_groups)
    _prefill_hopper[(min(num_programs, num_tiles * num_groups),)](
        q_desc,
        k_desc,
        v_desc,
        work,
        rows,
        out,
        scale * LOG2_E,
        num_heads,
        num_tiles,
        table_row,
        block_size,
        pack,
        group,
        size,
        num,
        stages,
        heads_first,
        pingpong,
        clear,
        num_warps=4,
        maxnreg=168,
    )
    return out
