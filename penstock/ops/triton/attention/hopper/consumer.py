"""The warpgroups that compute: each weighs a block of keys while the tensor cores add the block before."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from penstock.ops.triton.attention.hopper.tiles import (
    NUM,
    ROWS,
    SIZE,
    STAGES,
    count_blocks,
    count_rounds,
    find_rows,
    find_tile,
)

MIN_SCORE = gl.constexpr(-1e30)  # under any score
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]), 2))
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # of 16 bytes per thread


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
def _start_scores(q, keys, k_ready, n):
    """Start the products of the queries and key block n."""
    mbarrier.wait(k_ready.index(n % STAGES), n // STAGES & 1)
    nothing = gl.zeros([ROWS, NUM], gl.float32, SCORES)
    return warpgroup_mma(q, keys.index(n % STAGES).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _start_sums(p, sums, values, v_ready, n):
    """Start adding the values of key block n, weighted by p."""
    mbarrier.wait(v_ready.index(n % STAGES), n // STAGES & 1)
    return warpgroup_mma(p, values.index(n % STAGES), sums, is_async=True)


@gluon.jit
def _step(q, p, top, total, sums, keys, values, bars, n, j, position, factor, MASKED: gl.constexpr):
    """Weigh key block n while the tensor cores add block n - 1."""
    _, _, k_ready, k_empty, v_ready, v_empty = bars
    scores = _start_scores(q, keys, k_ready, n)
    sums = _start_sums(p, sums, values, v_ready, n - 1)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_empty.index(n % STAGES), count=1)
    weights, kept, top, total = _soften(scores, top, total, factor, j, position, MASKED)
    weights = gl.convert_layout(weights.to(p.dtype), WEIGHTS)
    total = _hold(total)
    # The wait takes the new weights too: else the compiler would compute them after it.
    sums, p, weights = warpgroup_mma_wait(0, deps=(sums, p, weights))
    mbarrier.arrive(v_empty.index((n - 1) % STAGES), count=1)
    kept = gl.convert_layout(kept, gl.SliceLayout(1, SUMS))
    return weights, top, total, sums * kept[:, None]


@gluon.jit
def _clear_values(values, num_valid):
    """Zero the values past a sequence's end: a weight of 0 does not hide a NaN."""
    row = gl.arange(0, NUM, gl.SliceLayout(1, LINES))
    x = values.load(LINES)
    values.store(gl.where((row < num_valid)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def _store(out, sums, total, begin, first_query, count, group, num_heads, part: gl.constexpr, PACK: gl.constexpr):
    """Store the rows of a tile that have a query."""
    total = gl.convert_layout(total, gl.SliceLayout(1, SUMS))
    y = gl.convert_layout((sums / total[:, None]).to(out.dtype.element_ty), LINES)
    r = part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    d = gl.arange(0, SIZE, gl.SliceLayout(0, LINES))
    token = first_query + r // PACK
    row = (begin + token).to(gl.int64) * num_heads + group * PACK + r % PACK
    gl.store(out + (row * SIZE)[:, None] + d[None, :], y, mask=(token < count)[:, None])


@gluon.jit
def consume(views, bars, work, out, factor, num_heads, num_tiles, part: gl.constexpr, PACK: gl.constexpr):
    """Compute 64 rows of every tile of this program. What the next tiles are is loaded while one is computed."""
    queries, keys, values = views
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty = bars
    r = part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    column = gl.arange(0, NUM, gl.SliceLayout(0, SCORES))
    q = queries.index(part)
    counter = 0
    s, first_query, group = find_tile(work, num_tiles, 0)
    begin, count, length = find_rows(work, s)
    next_s, next_query, next_group = find_tile(work, num_tiles, 1)
    for turn in range(count_rounds(work, num_tiles)):
        next_begin, next_count, next_length = find_rows(work, next_s)
        later_s, later_query, later_group = find_tile(work, num_tiles, turn + 2)
        first = length - count + first_query
        position = first + r // PACK
        blocks = count_blocks(first, length, PACK)
        masked = gl.maximum(blocks - (first + 1) // NUM, 1)  # key blocks that some query sees in part
        top = gl.full([ROWS], MIN_SCORE, gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
        sums = gl.zeros([ROWS, SIZE], gl.float32, SUMS)
        mbarrier.wait(q_ready.index(part), turn & 1)
        scores = warpgroup_mma_wait(0, deps=(_start_scores(q, keys, k_ready, counter),))
        mbarrier.arrive(k_empty.index(counter % STAGES), count=1)
        j = (blocks - 1) * NUM + column
        weights, kept, top, total = _soften(scores, top, total, factor, j, position, True)
        p = gl.convert_layout(weights.to(out.dtype.element_ty), WEIGHTS)
        if blocks * NUM > length:
            mbarrier.wait(v_ready.index(counter % STAGES), counter // STAGES & 1)
            _clear_values(values.index(counter % STAGES), length - (blocks - 1) * NUM)
        for n in range(1, gl.minimum(masked, blocks)):
            j = (blocks - 1 - n) * NUM + column
            p, top, total, sums = _step(
                q, p, top, total, sums, keys, values, bars, counter + n, j, position, factor, True
            )
        for n in range(masked, blocks):
            p, top, total, sums = _step(
                q, p, top, total, sums, keys, values, bars, counter + n, column, position, factor, False
            )
        mbarrier.arrive(q_empty.index(part), count=1)
        counter += blocks
        sums = _start_sums(p, sums, values, v_ready, counter - 1)
        sums, p = warpgroup_mma_wait(0, deps=(sums, p))
        mbarrier.arrive(v_empty.index((counter - 1) % STAGES), count=1)
        _store(out, sums, total, begin, first_query, count, group, num_heads, part, PACK)
        s, first_query, group = next_s, next_query, next_group
        begin, count, length = next_begin, next_count, next_length
        next_s, next_query, next_group = later_s, later_query, later_group
