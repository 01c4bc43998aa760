from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.matmul.int_product import PAIR, PANEL, bits_of, int_product, sets_of
from penstock.ops.triton.elementwise import activate
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.matmul.epilogue import apply_epilogue, epilogue_args
from penstock.ops.triton.matmul.int_rows import (
    ONE,
    decode_field,
    dequantize,
    find_units,
    load_scales,
    sum_ints,
    unpack_half,
    view_scales,
)
from penstock.ops.triton.norm import apply_norm
from penstock.ops.triton.sizes import cdiv, nearest_power_of_2
from penstock.ops.triton.tuning import (
    DEQUANTIZE_SCRATCH_BYTES,
    EPILOGUE_BLOCK,
    INT_STAGES,
    MAX_GATED_GEMV_WIDTH,
    MAX_INT_TILE_ROWS,
    MIN_LARGE_WEIGHT,
    int_gemv_shape,
    int_tile_shape,
)

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_scratch: dict[torch.device, Tensor] = {}


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


@triton.jit
def _int_gemv(
    x,
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
    """One row times ROWS outputs. The norm's factor is applied to the sums, so that x is read once; weights are read
    one block ahead, the first block before waiting for x."""
    FIELDS: tl.constexpr = 16 // BITS
    SCALED: tl.constexpr = 1 if SETS == 4 else 2  # fields with one scale
    SCALES: tl.constexpr = 16 * SETS // BITS if SETS else 4  # of a panel's units together
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, num_out - 1).to(tl.int64)  # beyond the last it is the last once more
    unit, word = tl.arange(0, UNITS), tl.arange(0, UNITS * 4)
    num_units = num_pairs * (BITS // 2)
    place, scale_at = find_units(words, scales, row, unit, word, num_pairs, BITS, SETS)
    second, second_at = find_units(words, scales, num_out + row, unit, word, num_pairs, BITS, SETS)
    some = (word < num_units * 4)[None, :]
    w = tl.load(place, mask=some, other=0, eviction_policy="evict_first")
    u = w
    if GATED:
        u = tl.load(second, mask=some, other=0, eviction_policy="evict_first")
    wait_for_previous(PDL)
    sums, ups = tl.zeros((ROWS, UNITS), tl.float32), tl.zeros((ROWS, UNITS), tl.float32)
    squares = tl.zeros((UNITS * 4,), tl.float32)
    for start in range(0, num_units if AHEAD else UNITS, UNITS):
        next_w, next_u = w, u
        if AHEAD:
            some = ((start + UNITS) * 4 + word < num_units * 4)[None, :]
            further = (start + UNITS) * 32  # words of a panel's units together
            next_w = tl.load(place + further, mask=some, other=0, eviction_policy="evict_first")
            if GATED:
                next_u = tl.load(second + further, mask=some, other=0, eviction_policy="evict_first")
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
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < num_out)


@triton.jit(do_not_specialize=["num_rows"])
def _int_gemm(
    x,
    halves,
    scales,
    sums,
    num_rows,
    num_out,
    num_pairs,
    width,
    x_row,
    steps,
    BITS: tl.constexpr,
    SETS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """OUTPUTS outputs of all rows over one split of the inputs, `steps` times PAIRS pairs, into sums[split, T, O]."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.minimum(n, num_out - 1).to(tl.int64)
    r, k = tl.arange(0, ROWS), tl.arange(0, 16)
    first = tl.program_id(1) * steps * PAIRS
    place = halves + ((row // 8 * num_pairs * 8 + row % 8) * (4 * BITS))[:, None] + k[None, :]
    SCALES: tl.constexpr = 8 * SETS if SETS else 8  # words of a pair
    scale_at = scales + row // 8 * num_pairs * SCALES + row % 8
    values = x + tl.minimum(r, num_rows - 1).to(tl.int64)[None, :] * x_row + k[:, None]
    wait_for_previous(PDL)
    end = tl.minimum(first + steps * PAIRS, num_pairs)
    acc = sum_ints(
        place, scale_at, values, first, end, width, BITS, SETS, OUTPUTS, ROWS, PAIRS, STAGES, WHOLE, ASM, DTYPE
    )
    line = (tl.program_id(1).to(tl.int64) * num_rows + r)[None, :] * num_out
    tl.store(
        sums + line + n[:, None], acc.to(sums.dtype.element_ty), mask=(n < num_out)[:, None] & (r < num_rows)[None, :]
    )


@triton.jit(do_not_specialize=["num_rows"])
def _int_epilogue(
    sums,
    out,
    epilogue,
    num_rows,
    num_out,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the splits and apply the epilogue."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < num_out
    line = num_out * (2 if GATED else 1)
    y, up = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        place = sums + (split * num_rows + row) * line + n
        y += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(place + num_out, mask=inside, other=0.0).to(tl.float32)
    residual_at = row * epilogue.residual_row + n
    y = apply_epilogue(y, up, epilogue, n, inside, residual_at, inside, num_out, GATED, KIND, "")
    tl.store(out + row * num_out + n, y.to(out.dtype.element_ty), mask=inside)


def _finish(sums: Tensor, dtype: torch.dtype, epilogue: Epilogue) -> Tensor:
    """Turn sums[splits, T, O] into [T, O], gated [T, O/2], written into the residual if it is contiguous."""
    num_splits, num_rows, num_sums = sums.shape
    num_out, residual = epilogue.num_results(num_sums), epilogue.residual
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    out = residual
    if out is None or not out.is_contiguous():
        out = torch.empty((num_rows, num_out), dtype=dtype, device=sums.device)
    _int_epilogue[(num_rows, cdiv(num_out, EPILOGUE_BLOCK))](
        sums,
        out,
        epilogue_args(epilogue._replace(residual=residual)),
        num_rows,
        num_out,
        num_splits,
        epilogue.gated,
        epilogue.activation or "",
        EPILOGUE_BLOCK,
        num_warps=4,
        **pdl_options(sums),
    )
    return out


def _view_pairs(values: Tensor | None) -> tuple[Tensor | None, bool]:
    """View contiguous values as integers of two values each, if possible."""
    if values is None or values.numel() % 2 or values.storage_offset() % 2:
        return values, False
    return values.view(-1).view(torch.int64 if values.itemsize == 4 else torch.int32), True


def _gemv(
    x: Tensor, words: Tensor, scales: Tensor, num_out: int, epilogue: Epilogue, norm: Tensor | None, eps: float
) -> Tensor:
    """Multiply one row, as `product.gemv` does."""
    activation = epilogue.activation
    if epilogue.gated and x.shape[1] > MAX_GATED_GEMV_WIDTH and activation is not None:
        y = activate(_gemv(x, words, scales, num_out, Epilogue(epilogue.bias), norm, eps), activation, gated=True)
        return y if epilogue.residual is None else epilogue.residual.add_(y)
    num_results = epilogue.num_results(num_out)
    bits, num_pairs = bits_of(words), words.shape[1]
    num_units = num_pairs * bits // 2
    out = torch.empty((1, num_results), dtype=x.dtype, device=x.device)
    rows, units = int_gemv_shape(num_units, num_results)
    values, is_paired = _view_pairs(x)
    weights, norm_is_paired = _view_pairs(None if norm is None else norm.float())
    _int_gemv[(cdiv(num_results, rows),)](
        values,
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


def _tile_gemm(x: Tensor, words: Tensor, scales: Tensor, num_out: int, epilogue: Epilogue) -> Tensor:
    """Multiply a few rows on tensor cores, dequantizing in registers."""
    (num_rows, width), num_pairs = x.shape, words.shape[1]
    outputs, rows, pairs, num_warps, wanted = int_tile_shape(num_rows, num_out, num_pairs)
    tiles, steps = cdiv(num_out, outputs), num_pairs // pairs
    num_splits = max(1, min(nearest_power_of_2(wanted / tiles), steps // 2))
    per_split = cdiv(steps, num_splits)
    num_splits = cdiv(steps, per_split)
    is_bare = num_splits == 1 and epilogue == NO_EPILOGUE
    sums = torch.empty((num_splits, num_rows, num_out), dtype=x.dtype if is_bare else torch.float32, device=x.device)
    _int_gemm[(tiles, num_splits)](
        x,
        words.view(torch.int16),
        scales.view(torch.int32),
        sums,
        num_rows,
        num_out,
        num_pairs,
        width,
        x.stride(0),
        per_split,
        bits_of(words),
        sets_of(scales),
        outputs,
        rows,
        pairs,
        INT_STAGES,
        width % PAIR == 0,
        not triton.knobs.runtime.interpret,
        num_warps=num_warps,
        **pdl_options(x),
    )
    return sums[0] if is_bare else _finish(sums, x.dtype, epilogue)


def scratch(device: torch.device) -> Tensor:
    """Return the buffer into which all products of many rows dequantize, one after the other on one stream. It never
    moves, since captured graphs know its address."""
    if device not in _scratch:
        _scratch[device] = torch.empty(DEQUANTIZE_SCRATCH_BYTES, dtype=torch.uint8, device=device)
    return _scratch[device]


def _dequantized_gemm(x: Tensor, words: Tensor, scales: Tensor, num_out: int, epilogue: Epilogue) -> Tensor:
    """Multiply many rows by cuBLAS, some dequantized outputs at a time."""
    num_rows, width = x.shape
    room = scratch(x.device).view(x.dtype)
    at_once = max(1, len(room) // width // PANEL) * PANEL
    sums = torch.empty((1, num_rows, num_out), dtype=x.dtype, device=x.device)
    for first in range(0, num_out, at_once):
        part = slice(first, min(first + at_once, num_out))
        weight = room[: (part.stop - first) * width].view(-1, width)
        panels = slice(first // PANEL, cdiv(part.stop, PANEL))
        dequantize(weight, words[panels], scales[panels])
        torch.mm(x, weight.t(), out=sums[0, :, part])
    return sums[0] if epilogue == NO_EPILOGUE else _finish(sums, x.dtype, epilogue)


def _prefers_tile(x: Tensor, words: Tensor, num_out: int) -> bool:
    """Return True if tensor cores are faster for a single row: with large 4-bit weights, which are slow to decode."""
    return bits_of(words) == 4 and num_out * x.shape[1] > MIN_LARGE_WEIGHT and x.itemsize == 2


@int_product.impl("cuda", exact=False)
def _body(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    num_out: int,
    epilogue: Epilogue = NO_EPILOGUE,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Use a fused GEMV for one row, a tensor-core tile for a few, cuBLAS on dequantized weights for more."""
    is_large = num_out * x.shape[1] >= MIN_LARGE_WEIGHT
    is_one = x.shape[0] == 1 and x.is_contiguous() and not _prefers_tile(x, words, num_out)
    if eps > 0 and (not is_one or (is_large and norm is not None)):  # many programs would read a norm's weights again
        x, norm, eps = apply_norm(x, norm, eps), None, 0.0
    if is_one:
        return _gemv(x, words, scales, num_out, epilogue, norm, eps)
    x = x if x.stride(1) == 1 else x.contiguous()
    if not x.shape[0]:
        return x.new_empty((0, epilogue.num_results(num_out)))
    max_rows = MAX_INT_TILE_ROWS if is_large else MAX_INT_TILE_ROWS // 2
    multiply = _tile_gemm if x.shape[0] <= max_rows and x.dtype != torch.float32 else _dequantized_gemm
    return multiply(x, words, scales, num_out, epilogue)
