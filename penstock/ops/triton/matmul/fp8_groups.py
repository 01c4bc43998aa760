"""Products with 8-bit floats that have a scale for each group of inputs, as blocks of 128 × 128 do.

The weights that are multiplied are those that widening would give."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.matmul.fp8_product import fp8_group_product
from penstock.ops.matmul.int_product import PANEL
from penstock.ops.triton.elementwise import activate
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.matmul.epilogue import apply_epilogue, epilogue_args
from penstock.ops.triton.matmul.int_product import finish_splits, scratch
from penstock.ops.triton.norm import apply_norm
from penstock.ops.triton.sizes import cdiv, nearest_power_of_2
from penstock.ops.triton.tuning import MAX_FP8_TILE_ROWS, MAX_GEMV_GROUP, WIDEN_BLOCK, fp8_tile_shape, gemv_shape


@triton.jit
def sum_groups(
    weights,
    scales,
    values,
    first,
    end,
    width,
    num_lines,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return the products [OUTPUTS, ROWS] of the inputs first … end − 1 of weights, which begin at weights[OUTPUTS]
    with scales[OUTPUTS], the next group's num_lines further, and of rows that begin at values[ROWS]."""
    k = tl.arange(0, BLOCK)
    weights, values = weights[:, None] + k[None, :], values[None, :] + k[:, None]
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        scale = tl.load(scales + start // GROUP * num_lines)
        if EVEN:
            w = tl.load(weights + start)
            v = tl.load(values + start)
        else:
            w = tl.load(weights + start, mask=(start + k < width)[None, :], other=0.0)
            v = tl.load(values + start, mask=(start + k < width)[:, None], other=0.0)
        w = (w.to(tl.float32) * scale[:, None]).to(DTYPE)
        acc = tl.dot(w, v, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _group_gemm(
    x,
    codes,
    scales,
    sums,
    num_rows,
    num_out,
    width,
    x_row,
    per_split,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """OUTPUTS outputs of ROWS rows over one split of the inputs, into sums[split, T, O]."""
    wait_for_previous(PDL)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # neighbours read the same weights
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    line = tl.minimum(n, num_out - 1)  # beyond the last it is the last once more
    first = tl.program_id(2) * per_split
    acc = sum_groups(
        codes + line.to(tl.int64) * width,
        scales + line,
        x + tl.minimum(r, num_rows - 1).to(tl.int64) * x_row,
        first,
        tl.minimum(first + per_split, width),
        width,
        num_out,
        GROUP,
        OUTPUTS,
        ROWS,
        BLOCK,
        STAGES,
        EVEN,
        x.dtype.element_ty,
    )
    place = sums + (tl.program_id(2).to(tl.int64) * num_rows + r)[None, :] * num_out + n[:, None]
    tl.store(place, acc.to(sums.dtype.element_ty), mask=(n < num_out)[:, None] & (r < num_rows)[None, :])


@triton.jit
def _group_gemv(
    x,
    codes,
    scales,
    norm,
    out,
    epilogue,
    num_out,
    eps,
    NORMED: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row times OUTPUTS outputs. The norm's factor is applied to the sums, so that x is read once."""
    n, at, g = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, BLOCK), tl.arange(0, BLOCK // GROUP)
    line = tl.minimum(n, num_out - 1)  # beyond the last it is the last once more
    place = codes + line.to(tl.int64)[:, None] * WIDTH + at[None, :]
    wait_for_previous(PDL)
    sums, squares = tl.zeros((OUTPUTS, BLOCK // GROUP), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        inside = start + at < WIDTH
        w = tl.load(place + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        group = start // GROUP + g
        scale = tl.load(
            scales + group[None, :] * num_out + line[:, None], mask=(group * GROUP < WIDTH)[None, :], other=0.0
        )
        values = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
        squares += values * values
        if norm is not None:
            values *= tl.load(norm + start + at, mask=inside, other=0.0).to(tl.float32)
        products = tl.reshape(w.to(tl.float32) * values[None, :], (OUTPUTS, BLOCK // GROUP, GROUP))
        sums += scale * tl.sum(products, 2)
    y = tl.sum(sums, 1)
    if NORMED:
        y *= tl.rsqrt(tl.sum(squares) / WIDTH + eps)
    y = apply_epilogue(y, y, epilogue, line, None, line, None, num_out, False, KIND, "")
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < num_out)


@triton.jit
def _widen_groups(codes, scales, out, num_out, width, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Widen BLOCK inputs of an output."""
    wait_for_previous(PDL)
    line = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    scale = tl.load(scales + at // GROUP * num_out + line, mask=inside, other=0.0)
    y = tl.load(codes + line * width + at, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + line * width + at, y.to(out.dtype.element_ty), mask=inside)


def widen_outputs(out: Tensor, codes: Tensor, scale: Tensor, group: int, first: int) -> None:
    """Write the outputs from `first` on into out[O, C]."""
    num_lines, width = out.shape
    _widen_groups[(num_lines, cdiv(width, WIDEN_BLOCK))](
        codes[first : first + num_lines],
        scale[:, first:],
        out,
        len(codes),
        width,
        group,
        WIDEN_BLOCK,
        num_warps=4,
        **pdl_options(out),
    )


def _multiply_row(
    x: Tensor, codes: Tensor, scale: Tensor, group: int, epilogue: Epilogue, norm: Tensor | None, eps: float
) -> Tensor:
    """Multiply one row; a gate is a kernel of its own."""
    if epilogue.gated and epilogue.activation is not None:
        bare = _multiply_row(x, codes, scale, group, Epilogue(epilogue.bias), norm, eps)
        y = activate(bare, epilogue.activation, gated=True)
        return y if epilogue.residual is None else epilogue.residual.add_(y)
    num_out, width = codes.shape
    out = torch.empty((1, num_out), dtype=x.dtype, device=x.device)
    outputs, block, num_warps = gemv_shape(width, codes.itemsize)
    _group_gemv[(cdiv(num_out, outputs),)](
        x,
        codes,
        scale,
        norm,
        out,
        epilogue_args(epilogue),
        num_out,
        eps,
        eps > 0,
        epilogue.activation or "",
        width,
        group,
        outputs,
        block,
        num_warps=num_warps,
        **pdl_options(x),
    )
    return out


def group_gemm(x: Tensor, codes: Tensor, scale: Tensor, group: int, epilogue: Epilogue, exact: bool = False) -> Tensor:
    """Multiply some rows on tensor cores, widening in registers; if `exact` each sum is one chain."""
    (num_rows, width), num_out = x.shape, len(codes)
    shape = fp8_tile_shape(num_rows, group, x.itemsize)
    row_tiles, tiles, steps = (
        cdiv(num_rows, shape.num_rows),
        cdiv(num_out, shape.num_outs),
        cdiv(width, shape.num_inputs),
    )
    wanted = shape.num_programs / (tiles * row_tiles)
    num_splits = 1 if exact else max(1, min(nearest_power_of_2(wanted), steps // 2))
    per_split = cdiv(steps, num_splits)
    num_splits = cdiv(steps, per_split)
    is_bare = num_splits == 1 and epilogue == NO_EPILOGUE
    sums = torch.empty((num_splits, num_rows, num_out), dtype=x.dtype if is_bare else torch.float32, device=x.device)
    _group_gemm[(row_tiles, tiles, num_splits)](
        x,
        codes,
        scale,
        sums,
        num_rows,
        num_out,
        width,
        x.stride(0),
        per_split * shape.num_inputs,
        group,
        *shape.sizes(width),
        num_warps=shape.num_warps,
        **({"enable_fp_fusion": False} if exact else {}),
        **pdl_options(x),
    )
    return sums[0] if is_bare else finish_splits(sums, x.dtype, epilogue)


def _widened_gemm(x: Tensor, codes: Tensor, scale: Tensor, group: int, epilogue: Epilogue) -> Tensor:
    """Multiply many rows by cuBLAS, some widened outputs at a time."""
    (num_rows, width), num_out = x.shape, len(codes)
    room = scratch(x.device).view(x.dtype)
    at_once = max(1, len(room) // width // PANEL) * PANEL
    sums = torch.empty((1, num_rows, num_out), dtype=x.dtype, device=x.device)
    for first in range(0, num_out, at_once):
        last = min(first + at_once, num_out)
        weight = room[: (last - first) * width].view(-1, width)
        widen_outputs(weight, codes, scale, group, first)
        torch.mm(x, weight.t(), out=sums[0, :, first:last])
    return sums[0] if epilogue == NO_EPILOGUE else finish_splits(sums, x.dtype, epilogue)


@fp8_group_product.impl("cuda", exact=False)
def _body(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    group: int,
    epilogue: Epilogue = NO_EPILOGUE,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    is_power = group & group - 1 == 0 and group <= MAX_GEMV_GROUP
    if x.shape[0] == 1 and x.is_contiguous() and is_power and not (epilogue.gated and epilogue.activation is None):
        return _multiply_row(x, weight, scale, group, epilogue, norm, eps)
    y = apply_norm(x, norm, eps) if eps > 0 else x
    y = y if y.stride(1) == 1 else y.contiguous()
    if not len(y):
        return y.new_empty((0, epilogue.num_results(len(weight))))
    multiply = group_gemm if len(y) <= MAX_FP8_TILE_ROWS and y.itemsize == 2 else _widened_gemm
    return multiply(y, weight, scale, group, epilogue)
