"""GEMV of one row with integer codes, which are decoded two at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.matmul.epilogue import Epilogue
from penstock.ops.matmul.int_product import bits_of, sets_of
from penstock.ops.triton.elementwise import activate
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.matmul.epilogue import apply_epilogue, epilogue_args
from penstock.ops.triton.matmul.int_rows import ONE, decode_field, find_units, load_scales, unpack_half, view_scales
from penstock.ops.triton.sizes import cdiv
from penstock.ops.triton.tuning import MAX_GATED_GEMV_WIDTH, int_gemv_shape

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _load_pair(x, at, width, PAIRED: tl.constexpr, DTYPE: tl.constexpr):
    """Load values 2 at and 2 at + 1 as float32; PAIRED says that x holds two values in one integer."""
    k = 2 * at
    if PAIRED:
        both = tl.load(x + at, mask=k < width, other=0)
        if DTYPE == tl.bfloat16:  # noqa: SIM300
            a, b = (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)
        elif DTYPE == tl.float16:  # noqa: SIM300
            a, b = unpack_half(both, 0), unpack_half(both, 1)
        else:
            a = both.to(tl.int32).to(tl.float32, bitcast=True)
            b = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        a = tl.load(x + k, mask=k < width, other=0.0).to(tl.float32)
        b = tl.load(x + k + 1, mask=k + 1 < width, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _scale_units(part, total, added, scale, minimum, BITS: tl.constexpr, SETS: tl.constexpr):
    """Return what units of 4 words add to outputs [R, U]: part[R, 4 U] are sums of fields times inputs, total[4 U]
    those of the inputs, added[4 U] those of the inputs as multiplied. The offset of `decode_field` is subtracted;
    results are 256 times too small, with 4 bits 16 times."""
    UNITS: tl.constexpr = scale.shape[1]
    y = tl.sum(tl.reshape(part, (scale.shape[0], UNITS, 4)), 2)
    whole = tl.sum(tl.reshape(total, (UNITS, 4)), 1)
    if BITS == 4:
        y -= tl.sum(tl.reshape(added, (UNITS, 4)), 1)[None, :]
        return scale * y + minimum * (whole / 16)[None, :]
    elif SETS > 0:
        return scale * (y - (1.5 * whole)[None, :]) + minimum * (whole / 256)[None, :]
    else:
        return scale * (y - (1.5 * whole)[None, :])


class PairArgs(NamedTuple):
    """The matrix of each pair, and where its row is; `num_shared` neighbouring pairs share one."""

    ids: Any
    row: int  # from one to the next, in what is loaded at once
    num_shared: int


@triton.jit
def _find_pair(pairs, x, out, num_out, GATED: tl.constexpr, PDL: tl.constexpr):
    """Return where the row and the results of this program's pair begin, the first output of its matrix among all, and
    the matrix. Without pairs there is one of each."""
    first = tl.zeros((), tl.int64)
    matrix = 0
    if pairs is not None:
        wait_for_previous(PDL)  # for the ids
        pair = tl.program_id(1).to(tl.int64)
        matrix = tl.load(pairs.ids + pair)
        first += tl.maximum(matrix, 0).to(tl.int64) * (2 * num_out if GATED else num_out)
        x += pair // pairs.num_shared * pairs.row
        out += pair * num_out
    return x, out, first, matrix


@triton.jit
def _load_words(place, second, mask, GATED: tl.constexpr):
    """Load words, and those of ups where there are gates; once more the same elsewhere."""
    w = tl.load(place, mask=mask, other=0, eviction_policy="evict_first")
    u = w
    if GATED:
        u = tl.load(second, mask=mask, other=0, eviction_policy="evict_first")
    return w, u


@triton.jit
def run_int_gemv(
    x,
    pairs,
    words,
    scales,
    norm,
    out,
    epilogue,
    num_out,
    num_pairs,
    width,
    eps,
    one,
    BITS: tl.constexpr,
    SETS: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    AHEAD: tl.constexpr,
    PAIRED: tl.constexpr,
    NORM_PAIRED: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row times ROWS outputs, or one pair times those of its matrix. The norm's factor is applied to the sums, so
    that x is read once; weights are read one block ahead, the first block before waiting for x."""
    FIELDS: tl.constexpr = 16 // BITS
    SCALED: tl.constexpr = 1 if SETS == 4 else 2  # fields with one scale
    SCALES: tl.constexpr = 16 * SETS // BITS if SETS else 4  # of a panel's units together
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, num_out - 1).to(tl.int64)  # beyond the last it is the last once more
    x, out, first, matrix = _find_pair(pairs, x, out, num_out, GATED, PDL)
    row += first
    unit, word = tl.arange(0, UNITS), tl.arange(0, UNITS * 4)
    num_units = num_pairs * (BITS // 2)
    place, scale_at = find_units(words, scales, row, unit, word, num_pairs, BITS, SETS)
    second, second_at = find_units(words, scales, num_out + row, unit, word, num_pairs, BITS, SETS)
    some = (word < num_units * 4)[None, :]
    w, u = _load_words(place, second, some, GATED)
    wait_for_previous(PDL)
    sums, ups = tl.zeros((ROWS, UNITS), tl.float32), tl.zeros((ROWS, UNITS), tl.float32)
    squares = tl.zeros((UNITS * 4,), tl.float32)
    for start in range(0, num_units if AHEAD else UNITS, UNITS):
        next_w, next_u = w, u
        if AHEAD:
            some = ((start + UNITS) * 4 + word < num_units * 4)[None, :]
            further = (start + UNITS) * 32  # words of a panel's units together
            next_w, next_u = _load_words(place + further, second + further, some, GATED)
        inside = (start + unit < num_units)[None, :]
        here, there = scale_at + start * SCALES, second_at + start * SCALES
        for f in tl.static_range(FIELDS):
            if f % SCALED == 0:
                part, up_part = tl.zeros((ROWS, UNITS * 4), tl.float32), tl.zeros((ROWS, UNITS * 4), tl.float32)
                total, added = tl.zeros((UNITS * 4,), tl.float32), tl.zeros((UNITS * 4,), tl.float32)
            at = (start // 2 + word // 8) * (8 * FIELDS) + 8 * f + word % 8
            a, b = _load_pair(x, at, width, PAIRED, DTYPE)
            if NORMED:
                squares += a * a + b * b
            if norm is not None:
                c, d = _load_pair(norm, at, width, NORM_PAIRED, tl.float32)
                a *= c
                b *= d
            total += a + b
            if BITS == 4 and f % 2 == 0:
                a *= 16.0
                b *= 16.0
                added += 16.0 * total
            else:
                added += a + b
            part += decode_field(w, one, f, BITS) * a[None, :]
            part += decode_field(w, one, FIELDS + f, BITS) * b[None, :]
            if GATED:
                up_part += decode_field(u, one, f, BITS) * a[None, :]
                up_part += decode_field(u, one, FIELDS + f, BITS) * b[None, :]
            if f % SCALED == SCALED - 1:
                scale, minimum = load_scales(here + f * SETS // 4 * 8, inside, SETS)
                sums += _scale_units(part, total, added, scale, minimum, BITS, SETS)
                if GATED:
                    scale, minimum = load_scales(there + f * SETS // 4 * 8, inside, SETS)
                    ups += _scale_units(up_part, total, added, scale, minimum, BITS, SETS)
        w, u = next_w, next_u
    factor = 256.0 if BITS == 8 else 16.0
    if NORMED:
        factor *= tl.rsqrt(tl.sum(squares) / width + eps)
    y, up = factor * tl.sum(sums, 1), factor * tl.sum(ups, 1)
    y = apply_epilogue(y, up, epilogue, row, None, row, None, num_out, GATED, KIND, "")
    y = tl.where(matrix < 0, 0.0, y)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < num_out)


def view_pairs(values: Tensor | None) -> tuple[Tensor | None, bool]:
    """View contiguous values as integers of two values each, if possible."""
    if values is None or values.numel() % 2 or values.storage_offset() % 2:
        return values, False
    return values.view(-1).view(torch.int64 if values.itemsize == 4 else torch.int32), True


def int_gemv(
    x: Tensor, words: Tensor, scales: Tensor, num_out: int, epilogue: Epilogue, norm: Tensor | None, eps: float
) -> Tensor:
    """Multiply one row, as `product.gemv` does."""
    activation = epilogue.activation
    if epilogue.gated and x.shape[1] > MAX_GATED_GEMV_WIDTH and activation is not None:
        y = activate(int_gemv(x, words, scales, num_out, Epilogue(epilogue.bias), norm, eps), activation, gated=True)
        return y if epilogue.residual is None else epilogue.residual.add_(y)
    num_results = epilogue.num_results(num_out)
    bits, num_pairs = bits_of(words), words.shape[1]
    num_units = num_pairs * bits // 2
    out = torch.empty((1, num_results), dtype=x.dtype, device=x.device)
    rows, units = int_gemv_shape(num_units, num_results)
    values, is_paired = view_pairs(x)
    weights, norm_is_paired = view_pairs(None if norm is None else norm.float())
    run_int_gemv[(cdiv(num_results, rows),)](
        values,
        None,
        words,
        view_scales(scales),
        weights,
        out,
        epilogue_args(epilogue),
        num_results,
        num_pairs,
        x.shape[1],
        eps,
        ONE,
        bits,
        sets_of(scales),
        eps > 0,
        epilogue.gated,
        activation or "",
        rows,
        units,
        num_units > units,
        is_paired,
        norm_is_paired,
        DTYPES[x.dtype],
        num_warps=max(1, units // 32),
        **pdl_options(x),
    )
    return out
