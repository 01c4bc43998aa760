"""Grouped products: one program for each row and tile where few rows share a matrix, else tiles of sorted rows.

Nothing that a launch is given depends on the routing, so a captured step is right for any.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.experts.grouped_product import grouped_fp8_product, grouped_product
from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.triton.experts.sort import sort_pairs
from penstock.ops.triton.launch import dot_precision, has_large_smem, pdl_options, wait_for_previous
from penstock.ops.triton.matmul.chain import find_columns, split_gates, sum_chain
from penstock.ops.triton.matmul.epilogue import EpilogueArgs, apply_epilogue
from penstock.ops.triton.matmul.fp8_product import quantize_rows
from penstock.ops.triton.sizes import cdiv
from penstock.ops.triton.tuning import grouped_gemv_shape, grouped_tile, uses_grouped_gemv


class StackArgs(NamedTuple):
    """E matrices [O, C] as kernels take them, one after the other, and what their outputs are multiplied by."""

    weight: Any
    scale: Any  # [E · O], or None
    bias: Any  # likewise


class RowsArgs(NamedTuple):
    """Rows [T, C] to multiply. A pair is a row and its matrix; `num_shared` neighbouring pairs share a row."""

    x: Any
    row: int  # from one to the next
    num_shared: int
    scales: Any  # of quantized rows, or None


@triton.jit
def _grouped_gemv(
    rows,
    stack,
    ids,
    out,
    num_out,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    OUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One pair times OUTS outputs of its matrix."""
    wait_for_previous(PDL)
    pair = tl.program_id(1).to(tl.int64)
    matrix = tl.load(ids + pair)
    n, at = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.arange(0, BLOCK)
    own = tl.minimum(n, num_out - 1)  # beyond the last it is the last once more
    line = tl.maximum(matrix, 0).to(tl.int64) * (2 * num_out if GATED else num_out) + own
    place = stack.weight + line[:, None] * WIDTH + at[None, :]
    values_at = rows.x + pair // rows.num_shared * rows.row + at
    sums, ups = tl.zeros((OUTS, BLOCK), tl.float32), tl.zeros((OUTS, BLOCK), tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        inside = (start + at < tl.where(matrix < 0, 0, WIDTH))[None, :]
        values = tl.load(values_at + start, mask=start + at < WIDTH, other=0.0).to(tl.float32)[None, :]
        w = tl.load(place + start, mask=inside, other=0.0, eviction_policy="evict_first")
        sums += w.to(tl.float32) * values
        if GATED:
            u = tl.load(place + num_out * WIDTH + start, mask=inside, other=0.0, eviction_policy="evict_first")
            ups += u.to(tl.float32) * values
    y, up = tl.sum(sums, 1), tl.sum(ups, 1)
    if stack.scale is not None:
        y *= tl.load(stack.scale + line)
        if GATED:
            up *= tl.load(stack.scale + num_out + line)
    y = apply_epilogue(y, up, EpilogueArgs(stack.bias, None, 0), line, None, line, None, num_out, GATED, KIND, "")
    y = tl.where(matrix < 0, 0.0, y)
    tl.store(out + pair * num_out + n, y.to(out.dtype.element_ty), mask=n < num_out)


@triton.jit
def _grouped_gemm(
    rows,
    stack,
    order,
    tiles,
    out,
    num_out,
    width,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """OUTS outputs of one matrix by a tile of its rows; gated, half of them gates and half of them ups. Each sum is one
    chain over the inputs, in order: its bits do not depend on the tile. EVEN: the width is a multiple of BLOCK."""
    wait_for_previous(PDL)
    OWN: tl.constexpr = OUTS // 2 if GATED else OUTS
    begin, tile = tl.program_id(0) * OWN, tiles + 3 * tl.program_id(1)
    matrix, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if count > 0:
        r = tl.arange(0, ROWS)
        pair = tl.load(order + first + r, mask=r < count, other=0)
        row = (pair // rows.num_shared).to(tl.int64)
        line = tl.maximum(matrix, 0).to(tl.int64) * (2 * num_out if GATED else num_out)
        line += find_columns(begin, num_out, OUTS, GATED)
        sums = sum_chain(
            stack.weight + line * width,
            rows.x + row * rows.row,
            r < count,
            tl.where(matrix < 0, 0, width),
            OUTS,
            ROWS,
            BLOCK,
            EVEN,
            STAGES,
            PRECISION,
            "",
        )
        if stack.scale is not None:
            row_scale = tl.load(rows.scales + row, mask=r < count, other=0.0)[None, :]
            sums = sums * row_scale * tl.load(stack.scale + line)[:, None]
        if stack.bias is not None:
            sums += tl.load(stack.bias + line).to(tl.float32)[:, None]
        y, up = split_gates(sums, OUTS, ROWS, GATED)
        n = (begin + tl.arange(0, OWN))[:, None]
        y = apply_epilogue(y, up, EpilogueArgs(None, None, 0), None, None, None, None, num_out, GATED, KIND, "")
        y = tl.where(matrix < 0, 0.0, y)
        place = out + pair.to(tl.int64)[None, :] * num_out + n
        tl.store(place, y.to(out.dtype.element_ty), mask=(n < num_out) & (r < count)[None, :])


def read_rows(x: Tensor, ids: Tensor) -> tuple[Tensor, int]:
    """Return x[T, C] or x[T, K, C] as rows, and how many pairs share one."""
    if x.dim() == 3:
        return x.contiguous().flatten(0, 1), 1
    return x if x.stride(1) == 1 else x.contiguous(), ids.shape[1]


def _multiply_pairs(rows: RowsArgs, stack: StackArgs, ids: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    width = stack.weight.shape[1]
    num_outs, block, num_warps = grouped_gemv_shape(width, stack.weight.itemsize, epilogue.gated)
    _grouped_gemv[(cdiv(out.shape[2], num_outs), ids.numel())](
        rows,
        stack,
        ids,
        out,
        out.shape[2],
        epilogue.gated,
        epilogue.activation or "",
        width,
        num_outs,
        block,
        num_warps=num_warps,
        **pdl_options(rows.x),
    )


def _multiply_tiles(
    rows: RowsArgs, stack: StackArgs, ids: Tensor, num_matrices: int, out: Tensor, epilogue: Epilogue, exact: bool
) -> None:
    x, width = rows.x, stack.weight.shape[1]
    tile = grouped_tile(ids.numel(), num_matrices, x.itemsize, has_large_smem(x.device))
    order, tiles = sort_pairs(ids, num_matrices, tile.num_rows)
    num_own = tile.num_outs // 2 if epilogue.gated else tile.num_outs
    _grouped_gemm[(cdiv(out.shape[2], num_own), len(tiles))](
        rows,
        stack,
        order,
        tiles,
        out,
        out.shape[2],
        width,
        epilogue.gated,
        epilogue.activation or "",
        *tile.sizes(width),
        dot_precision(x.dtype),
        num_warps=tile.num_warps,
        **({"enable_fp_fusion": False} if exact else {}),
        **pdl_options(x),
    )


def _multiply(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    num_matrices: int,
    epilogue: Epilogue,
    exact: bool,
    scale: Tensor | None = None,
) -> Tensor:
    """Multiply as `grouped_product`; outputs of 8-bit weights are multiplied by scale[E · O]."""
    num_tokens, num_chosen = ids.shape
    num_out = epilogue.num_results(len(weight) // num_matrices)
    out = torch.empty((num_tokens, num_chosen, num_out), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    ids, stack, (values, num_shared) = ids.contiguous(), StackArgs(weight, scale, epilogue.bias), read_rows(x, ids)
    if not exact and uses_grouped_gemv(num_tokens, num_chosen, num_matrices):
        _multiply_pairs(RowsArgs(values, values.stride(0), num_shared, None), stack, ids, out, epilogue)
        return out
    scales = None
    if scale is not None:
        values, scales = quantize_rows(values, None, 0.0)
    rows = RowsArgs(values, values.stride(0), num_shared, scales)
    _multiply_tiles(rows, stack, ids, num_matrices, out, epilogue, exact)
    return out


@grouped_product.impl("cuda", exact=False)
def _body(x: Tensor, weight: Tensor, ids: Tensor, num_matrices: int, epilogue: Epilogue = NO_EPILOGUE) -> Tensor:
    return _multiply(x, weight, ids, num_matrices, epilogue, exact=False)


@grouped_product.impl("cuda", exact=True)
def _exact_body(x: Tensor, weight: Tensor, ids: Tensor, num_matrices: int, epilogue: Epilogue = NO_EPILOGUE) -> Tensor:
    return _multiply(x, weight, ids, num_matrices, epilogue, exact=True)


@grouped_fp8_product.impl("cuda", exact=False)
def _fp8_body(
    x: Tensor, codes: Tensor, scale: Tensor, ids: Tensor, num_matrices: int, epilogue: Epilogue = NO_EPILOGUE
) -> Tensor:
    return _multiply(x, codes, ids, num_matrices, epilogue, False, scale)


@grouped_fp8_product.impl("cuda", exact=True)
def _exact_fp8_body(
    x: Tensor, codes: Tensor, scale: Tensor, ids: Tensor, num_matrices: int, epilogue: Epilogue = NO_EPILOGUE
) -> Tensor:
    """Quantize every row, a single one too."""
    return _multiply(x, codes, ids, num_matrices, epilogue, True, scale)
