"""Deterministic GEMM: split-K with splits fixed by the weight's shape, added in order.

Outputs are the first dimension of a tile and rows the second, so that a tile of 16 rows uses the same instruction as
one of 128 and gives a row the same bits. For a few rows the splits run side by side and a second kernel adds them; for
many rows one program loops over them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.matmul.product import product
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.matmul.epilogue import apply_epilogue, epilogue_args
from penstock.ops.triton.norm import apply_norm
from penstock.ops.triton.sizes import cdiv
from penstock.ops.triton.tuning import (
    EPILOGUE_BLOCK,
    EXACT_GROUP_TILES,
    EXACT_LARGE_TILE_OUTPUTS,
    EXACT_TILE_OUTPUTS,
    EXACT_TILE_ROWS,
    MIN_EXACT_PROGRAMS,
    MIN_SPLIT_BLOCKS,
)


@triton.jit
def _dot_split(
    x,
    weight,
    row,
    out,
    start,
    end,
    width,
    x_row,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return dot products over the inputs start … end - 1, for outputs out[OUTS] and rows row[ROWS]."""
    at = tl.arange(0, BLOCK)
    weights = weight + out.to(tl.int64)[:, None] * width + at[None, :]
    values = x + row.to(tl.int64)[:, None] * x_row + at[None, :]
    sums = tl.zeros((OUTS, ROWS), tl.float32)
    for begin in range(start, end, BLOCK):
        inside = (begin + at < width)[None, :]
        w = tl.load(weights + begin, mask=inside, other=0.0)
        y = tl.load(values + begin, mask=inside, other=0.0)
        if w.dtype == tl.float8e4nv:  # FP8 instructions keep few bits of a sum: move it to registers per block
            sums = tl.dot(w, tl.trans(y), sums, max_num_imprecise_acc=BLOCK)
        else:
            sums = tl.dot(w, tl.trans(y), sums, input_precision=PRECISION)
    return sums


@triton.jit
def _dot_in_order(
    x,
    weight,
    row,
    out,
    share,
    width,
    x_row,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return dot products over all inputs, split after split."""
    total = tl.zeros((OUTS, ROWS), tl.float32)
    for start in range(0, width, share):
        total += _dot_split(
            x, weight, row, out, start, tl.minimum(start + share, width), width, x_row, OUTS, ROWS, BLOCK, PRECISION
        )
    return total


@triton.jit
def _scale_sums(y, row_scale, scale, at, inside):
    """Multiply FP8 sums by their row's and their output's scale, if there are scales."""
    if scale is not None:
        y = y * row_scale * tl.load(scale + at, mask=inside, other=0.0)
    return y


@triton.jit(do_not_specialize=["num_rows"])
def _split_gemm(
    x,
    weight,
    splits,
    num_rows,
    num_out,
    width,
    share,
    x_row,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write one split of a tile to splits[P, T, O]."""
    wait_for_previous(PDL)
    n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    start = split * share
    y = _dot_split(
        x,
        weight,
        tl.minimum(t, num_rows - 1),
        tl.minimum(n, num_out - 1),
        start,
        tl.minimum(start + share, width),
        width,
        x_row,
        OUTS,
        ROWS,
        BLOCK,
        PRECISION,
    )
    at = (split.to(tl.int64) * num_rows + t)[None, :] * num_out + n[:, None]
    tl.store(splits + at, y, mask=(t < num_rows)[None, :] & (n < num_out)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _add_splits(
    splits,
    row_scales,
    scale,
    out,
    epilogue,
    num_rows,
    num_out,
    num_splits,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the splits of some outputs of one row in order, and apply the epilogue."""
    wait_for_previous(PDL)
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < num_out
    wide = num_out * (2 if GATED else 1)
    y = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    for split in range(num_splits):
        line = splits + (split * num_rows.to(tl.int64) + t) * wide
        y += tl.load(line + n, mask=inside, other=0.0)
        if GATED:
            up += tl.load(line + num_out + n, mask=inside, other=0.0)
    row_scale = None
    if row_scales is not None:
        row_scale = tl.load(row_scales + t)
    y = _scale_sums(y, row_scale, scale, n, inside)
    if GATED:
        up = _scale_sums(up, row_scale, scale, num_out + n, inside)
    y = apply_epilogue(y, up, epilogue, n, inside, t * epilogue.residual_row + n, inside, num_out, GATED, KIND, "")
    tl.store(out + t * num_out + n, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _gemm(
    x,
    weight,
    row_scales,
    scale,
    out,
    epilogue,
    num_rows,
    num_out,
    width,
    share,
    x_row,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a tile of many rows and apply the epilogue. GROUP_TILES output tiles take turns over the rows, to share
    them in L2."""
    wait_for_previous(PDL)
    in_group = GROUP_TILES * tl.cdiv(num_rows, ROWS)
    first = tl.program_id(0) // in_group * GROUP_TILES
    size = tl.minimum(tl.cdiv(num_out, OUTS) - first, GROUP_TILES)
    place = tl.program_id(0) % in_group
    n = (first + place % size) * OUTS + tl.arange(0, OUTS)
    t = place // size * ROWS + tl.arange(0, ROWS)
    row, column = tl.minimum(t, num_rows - 1), tl.minimum(n, num_out - 1)
    at, there = n[:, None], (n < num_out)[:, None]
    inside = there & (t < num_rows)[None, :]
    row_scale = None
    if row_scales is not None:
        row_scale = tl.load(row_scales + row)[None, :]
    y = _dot_in_order(x, weight, row, column, share, width, x_row, OUTS, ROWS, BLOCK, PRECISION)
    y = _scale_sums(y, row_scale, scale, at, there)
    up = y
    if GATED:
        up = _dot_in_order(x, weight, row, num_out + column, share, width, x_row, OUTS, ROWS, BLOCK, PRECISION)
        up = _scale_sums(up, row_scale, scale, num_out + at, there)
    line = t.to(tl.int64)[None, :]
    residual_at = line * epilogue.residual_row + at
    y = apply_epilogue(y, up, epilogue, at, there, residual_at, inside, num_out, GATED, KIND, "")
    tl.store(out + line * num_out + at, y.to(out.dtype.element_ty), mask=inside)


def split_inputs(num_out: int, width: int, block: int) -> tuple[int, int]:
    """Return how many splits a weight's inputs have and the inputs of each, by the weight's shape alone."""
    blocks = cdiv(width, block)
    wanted = min(cdiv(MIN_EXACT_PROGRAMS, cdiv(num_out, EXACT_TILE_OUTPUTS)), max(1, blocks // MIN_SPLIT_BLOCKS))
    share = cdiv(blocks, wanted)
    return cdiv(blocks, share), share * block


def _tile_rows(num_rows: int, dtype: torch.dtype) -> int:
    largest = EXACT_TILE_ROWS[-1]
    limit = 32 if dtype == torch.float32 else largest  # float32 has no tensor-core instruction
    return min(limit, next((rows for rows in EXACT_TILE_ROWS if rows >= num_rows), largest))


def exact_gemm(
    x: Tensor,
    weight: Tensor,
    epilogue: Epilogue,
    dtype: torch.dtype,
    row_scales: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Multiply as `product` without its norm; FP8 sums are multiplied by row_scales[T] and scale[O]."""
    num_rows, (wide, width) = x.shape[0], weight.shape
    num_out = epilogue.num_results(wide)
    out = residual = epilogue.residual
    if out is None or not out.is_contiguous() or out.dtype != dtype:
        out = torch.empty((num_rows, num_out), dtype=dtype, device=x.device)
    if not out.numel():
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        epilogue = epilogue._replace(residual=residual.contiguous())
    after, kind = epilogue_args(epilogue), epilogue.activation or ""
    rows, block = _tile_rows(num_rows, x.dtype), 128 // x.element_size()
    num_splits, share = split_inputs(wide, width, block)
    is_largest = rows == EXACT_TILE_ROWS[-1]
    outs = EXACT_LARGE_TILE_OUTPUTS if is_largest else EXACT_TILE_OUTPUTS
    tiles = cdiv(num_rows, rows)
    options = {
        "num_warps": 8 if is_largest else 4,
        "num_stages": 2 if x.element_size() == 4 else 3 if is_largest else 5,
        "enable_fp_fusion": False,
        **pdl_options(x),
    }
    if num_rows > EXACT_TILE_OUTPUTS and tiles * cdiv(wide, outs) >= MIN_EXACT_PROGRAMS // 4:
        outs = EXACT_TILE_OUTPUTS if epilogue.gated else outs  # the sums of gate and up are held at once
        _gemm[(tiles * cdiv(num_out, outs),)](
            x,
            weight,
            row_scales,
            scale,
            out,
            after,
            num_rows,
            num_out,
            width,
            share,
            x.stride(0),
            epilogue.gated,
            kind,
            outs,
            rows,
            block,
            EXACT_GROUP_TILES,
            "ieee",
            **options,
        )
        return out
    splits = torch.empty((num_splits, num_rows, wide), device=x.device)
    _split_gemm[(cdiv(wide, outs), tiles, num_splits)](
        x, weight, splits, num_rows, wide, width, share, x.stride(0), outs, rows, block, "ieee", **options
    )
    _add_splits[(num_rows, cdiv(num_out, EPILOGUE_BLOCK))](
        splits,
        row_scales,
        scale,
        out,
        after,
        num_rows,
        num_out,
        num_splits,
        epilogue.gated,
        kind,
        EPILOGUE_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
        **pdl_options(x),
    )
    return out


@product.impl("cuda", exact=True)
def _body(
    x: Tensor, weight: Tensor, epilogue: Epilogue = NO_EPILOGUE, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    y = apply_norm(x, norm, eps) if eps > 0 else x
    return exact_gemm(y, weight, epilogue, x.dtype)
