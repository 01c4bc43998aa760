"""Grouped products with integer codes: one program for each row and tile where few rows share a matrix, else tiles of
sorted rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.experts.grouped_product import grouped_int_product
from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.matmul.int_product import PAIR, bits_of, sets_of
from penstock.ops.triton.elementwise import activate
from penstock.ops.triton.experts.grouped_product import RowsArgs, read_rows
from penstock.ops.triton.experts.sort import sort_pairs
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.matmul.epilogue import epilogue_args
from penstock.ops.triton.matmul.int_gemv import DTYPES, PairArgs, run_int_gemv, view_pairs
from penstock.ops.triton.matmul.int_rows import ONE, sum_ints, view_scales
from penstock.ops.triton.sizes import cdiv
from penstock.ops.triton.tuning import (
    INT_STAGES,
    INT_TILE_ROWS,
    MAX_GATED_GEMV_WIDTH,
    int_gemv_shape,
    int_tile_shape,
    uses_grouped_gemv,
)


@triton.jit
def _grouped_int_gemm(
    rows,
    halves,
    scales,
    bias,
    order,
    tiles,
    out,
    num_out,
    num_pairs,
    width,
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
    """OUTPUTS outputs of one matrix by a tile of its rows."""
    wait_for_previous(PDL)
    tile = tiles + 3 * tl.program_id(1)
    matrix, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if count > 0:
        n, r, k = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS), tl.arange(0, 16)
        line = tl.maximum(matrix, 0).to(tl.int64) * num_out + tl.minimum(n, num_out - 1)
        pair = tl.load(order + first + tl.minimum(r, count - 1))
        SCALES: tl.constexpr = 8 * SETS if SETS else 8  # words of a pair of groups
        sums = sum_ints(
            halves + ((line // 8 * num_pairs * 8 + line % 8) * (4 * BITS))[:, None] + k[None, :],
            scales + line // 8 * num_pairs * SCALES + line % 8,
            rows.x + (pair // rows.num_shared).to(tl.int64)[None, :] * rows.row + k[:, None],
            0,
            num_pairs,
            width,
            BITS,
            SETS,
            OUTPUTS,
            ROWS,
            PAIRS,
            STAGES,
            WHOLE,
            ASM,
            rows.x.dtype.element_ty,
        )
        if bias is not None:
            sums += tl.load(bias + line).to(tl.float32)[:, None]
        sums = tl.where(matrix < 0, 0.0, sums)
        place = out + pair.to(tl.int64)[None, :] * num_out + n[:, None]
        tl.store(place, sums.to(out.dtype.element_ty), mask=(n < num_out)[:, None] & (r < count)[None, :])


def _multiply(
    x: Tensor, words: Tensor, scales: Tensor, ids: Tensor, num_matrices: int, epilogue: Epilogue, exact: bool
) -> Tensor:
    (num_tokens, num_chosen), (panels, num_pairs, panel, _), width = ids.shape, words.shape, x.shape[-1]
    num_out = panels * panel // num_matrices
    if not exact and ids.numel() and uses_grouped_gemv(num_tokens, num_chosen, num_matrices):
        return _multiply_pairs(x, words, scales, ids.contiguous(), num_out, epilogue)
    sums = torch.empty((num_tokens, num_chosen, num_out), dtype=x.dtype, device=x.device)
    if sums.numel():
        each = min(INT_TILE_ROWS[-1], cdiv(ids.numel(), num_matrices))
        outputs, num_rows, pairs, num_warps, _ = int_tile_shape(each, num_out, num_pairs)
        order, tiles = sort_pairs(ids.contiguous(), num_matrices, num_rows)
        values, num_shared = read_rows(x, ids)
        _grouped_int_gemm[(cdiv(num_out, outputs), len(tiles))](
            RowsArgs(values, values.stride(0), num_shared, None),
            words.view(torch.int16),
            scales.view(torch.int32),
            epilogue.bias,
            order,
            tiles,
            sums,
            num_out,
            num_pairs,
            width,
            bits_of(words),
            sets_of(scales),
            outputs,
            num_rows,
            pairs,
            INT_STAGES,
            width % PAIR == 0,
            x.itemsize == 2 and not triton.knobs.runtime.interpret,
            num_warps=num_warps,
            **({"enable_fp_fusion": False} if exact else {}),
            **pdl_options(x),
        )
    return _activate(sums, epilogue)


def _activate(sums: Tensor, epilogue: Epilogue) -> Tensor:
    if epilogue.activation is None:
        return sums
    y = activate(sums.flatten(0, 1), epilogue.activation, epilogue.gated)
    return y.view(*sums.shape[:2], y.shape[1])


def _multiply_pairs(x: Tensor, words: Tensor, scales: Tensor, ids: Tensor, num_out: int, epilogue: Epilogue) -> Tensor:
    """Multiply each pair by itself; gates and ups at once if both fit in a program's registers."""
    width = x.shape[-1]
    fused = epilogue if width <= MAX_GATED_GEMV_WIDTH or not epilogue.gated else Epilogue(epilogue.bias)
    num_results, num_units = fused.num_results(num_out), words.shape[1] * bits_of(words) // 2
    out = torch.empty((*ids.shape, num_results), dtype=x.dtype, device=x.device)
    rows, units = int_gemv_shape(num_units, num_results)
    values, num_shared = read_rows(x.contiguous(), ids)
    paired, is_paired = view_pairs(values) if width % 2 == 0 else (values, False)
    run_int_gemv[(cdiv(num_results, rows), ids.numel())](
        paired,
        PairArgs(ids, width // 2 if is_paired else width, num_shared),
        words,
        view_scales(scales),
        None,
        out,
        epilogue_args(fused),
        num_results,
        words.shape[1],
        width,
        0.0,
        ONE,
        bits_of(words),
        sets_of(scales),
        False,
        fused.gated,
        fused.activation or "",
        rows,
        units,
        num_units > units,
        is_paired,
        False,
        DTYPES[x.dtype],
        num_warps=max(1, units // 32),
        **pdl_options(x),
    )
    return out if fused is epilogue else _activate(out, epilogue)


@grouped_int_product.impl("cuda", exact=False)
def _body(
    x: Tensor, words: Tensor, scales: Tensor, ids: Tensor, num_matrices: int, epilogue: Epilogue = NO_EPILOGUE
) -> Tensor:
    return _multiply(x, words, scales, ids, num_matrices, epilogue, exact=False)


@grouped_int_product.impl("cuda", exact=True)
def _exact_body(
    x: Tensor, words: Tensor, scales: Tensor, ids: Tensor, num_matrices: int, epilogue: Epilogue = NO_EPILOGUE
) -> Tensor:
    """Sums are one chain in any tile; only what the compiler may contract differs."""
    return _multiply(x, words, scales, ids, num_matrices, epilogue, exact=True)
