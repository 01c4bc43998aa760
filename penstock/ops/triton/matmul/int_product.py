from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.matmul.int_product import PAIR, PANEL, bits_of, int_product, sets_of
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.matmul.epilogue import apply_epilogue, epilogue_args
from penstock.ops.triton.matmul.int_dot import int_dots
from penstock.ops.triton.matmul.int_gemv import int_gemv
from penstock.ops.triton.matmul.int_rows import dequantize, sum_ints
from penstock.ops.triton.norm import apply_norm
from penstock.ops.triton.sizes import cdiv, nearest_power_of_2
from penstock.ops.triton.tuning import (
    DEQUANTIZE_SCRATCH_BYTES,
    EPILOGUE_BLOCK,
    INT_STAGES,
    MAX_INT_GEMV_VALUES,
    MAX_INT_TILE_ROWS,
    MIN_LARGE_WEIGHT,
    int_tile_shape,
)

_scratch: dict[torch.device, Tensor] = {}


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


def finish_splits(sums: Tensor, dtype: torch.dtype, epilogue: Epilogue) -> Tensor:
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


def tile_gemm(
    x: Tensor, words: Tensor, scales: Tensor, num_out: int, epilogue: Epilogue, exact: bool = False
) -> Tensor:
    """Multiply a few rows on tensor cores, dequantizing in registers; if `exact` each sum is one chain."""
    (num_rows, width), num_pairs = x.shape, words.shape[1]
    outputs, rows, pairs, num_warps, wanted = int_tile_shape(num_rows, num_out, num_pairs)
    tiles, steps = cdiv(num_out, outputs), num_pairs // pairs
    num_splits = 1 if exact else max(1, min(nearest_power_of_2(wanted / tiles), steps // 2))
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
        **({"enable_fp_fusion": False} if exact else {}),
        **pdl_options(x),
    )
    return sums[0] if is_bare else finish_splits(sums, x.dtype, epilogue)


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
    return sums[0] if epilogue == NO_EPILOGUE else finish_splits(sums, x.dtype, epilogue)


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
    """Use a fused GEMV for one row, integer dot products where its weight is large, a tensor-core tile for a few rows,
    cuBLAS on dequantized weights for more."""
    num_values = num_out * x.shape[1]
    if x.shape[0] == 1 and x.is_contiguous():
        multiply_one = int_dots if num_values > MAX_INT_GEMV_VALUES and x.itemsize == 2 else int_gemv
        return multiply_one(x, words, scales, num_out, epilogue, norm, eps)
    if eps > 0:
        x = apply_norm(x, norm, eps)
    x = x if x.stride(1) == 1 else x.contiguous()
    if not x.shape[0]:
        return x.new_empty((0, epilogue.num_results(num_out)))
    max_rows = MAX_INT_TILE_ROWS if num_values >= MIN_LARGE_WEIGHT else MAX_INT_TILE_ROWS // 2
    multiply = tile_gemm if x.shape[0] <= max_rows and x.dtype != torch.float32 else _dequantized_gemm
    return multiply(x, words, scales, num_out, epilogue)
