"""Parts of GEMM kernels in which every output is one chain of sums over the inputs, in order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_chain(
    weights,
    values,
    there,
    width,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Return the dot products [OUTS, ROWS] of weights, which begin at weights[OUTS], and of the rows that are `there`,
    which begin at values[ROWS] and are read past L1 if CACHE is `.cg`."""
    at = tl.arange(0, BLOCK)[None, :]
    weights, values, there = weights[:, None] + at, values[:, None] + at, there[:, None]
    sums = tl.zeros((OUTS, ROWS), tl.float32)
    for start in tl.range(0, width, BLOCK, num_stages=STAGES):
        if EVEN:
            w = tl.load(weights + start)
            y = tl.load(values + start, mask=there, other=0.0, cache_modifier=CACHE)
        else:
            w = tl.load(weights + start, mask=start + at < width, other=0.0)
            y = tl.load(values + start, mask=there & (start + at < width), other=0.0, cache_modifier=CACHE)
        if w.dtype == tl.float8e4nv:  # FP8 instructions keep few bits of a sum: move it to registers per block
            sums = tl.dot(w, tl.trans(y), sums, max_num_imprecise_acc=BLOCK)
        else:
            sums = tl.dot(w, tl.trans(y), sums, input_precision=PRECISION)
    return sums


@triton.jit
def find_columns(begin, num_out, OUTS: tl.constexpr, GATED: tl.constexpr):
    """Return the rows of the weights [OUTS] for outputs from `begin` on: if GATED, first their gates and then their
    ups. Beyond the last output it is the last once more."""
    OWN: tl.constexpr = OUTS // 2 if GATED else OUTS
    c = tl.arange(0, OUTS)
    return tl.minimum(begin + c % OWN, num_out - 1) + c // OWN * num_out


@triton.jit
def split_gates(sums, OUTS: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr):
    """Split sums[OUTS, ROWS] into gates and ups, as `find_columns` ordered them; both are the sums without gates."""
    y = sums
    up = sums
    if GATED:
        y, up = tl.split(tl.permute(tl.reshape(sums, (2, OUTS // 2, ROWS)), (1, 2, 0)))
    return y, up
