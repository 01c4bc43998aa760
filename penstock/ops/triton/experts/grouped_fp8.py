"""Grouped products with 8-bit floats that have a scale for each group of inputs, always in tiles of sorted rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.experts.grouped_product import grouped_fp8_group_product
from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.triton.elementwise import activate
from penstock.ops.triton.experts.grouped_product import RowsArgs, StackArgs, read_rows
from penstock.ops.triton.experts.sort import sort_pairs
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.matmul.fp8_groups import sum_groups
from penstock.ops.triton.sizes import cdiv
from penstock.ops.triton.tuning import fp8_tile_shape


@triton.jit
def _grouped_group_gemm(
    rows,
    stack,
    order,
    tiles,
    out,
    num_out,
    num_lines,
    width,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """OUTPUTS outputs of one matrix by a tile of its rows."""
    wait_for_previous(PDL)
    tile = tiles + 3 * tl.program_id(1)
    matrix, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if count > 0:
        n, r = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
        line = tl.maximum(matrix, 0).to(tl.int64) * num_out + tl.minimum(n, num_out - 1)
        pair = tl.load(order + first + tl.minimum(r, count - 1))
        sums = sum_groups(
            stack.weight + line * width,
            stack.scale + line,
            rows.x + (pair // rows.num_shared).to(tl.int64) * rows.row,
            0,
            width,
            width,
            num_lines,
            GROUP,
            OUTPUTS,
            ROWS,
            BLOCK,
            STAGES,
            EVEN,
            rows.x.dtype.element_ty,
        )
        if stack.bias is not None:
            sums += tl.load(stack.bias + line).to(tl.float32)[:, None]
        sums = tl.where(matrix < 0, 0.0, sums)
        place = out + pair.to(tl.int64)[None, :] * num_out + n[:, None]
        tl.store(place, sums.to(out.dtype.element_ty), mask=(n < num_out)[:, None] & (r < count)[None, :])


def _multiply(
    x: Tensor, stack: StackArgs, group: int, ids: Tensor, num_matrices: int, epilogue: Epilogue, exact: bool
) -> Tensor:
    (num_tokens, num_chosen), (num_lines, width) = ids.shape, stack.weight.shape
    num_out = num_lines // num_matrices
    sums = torch.empty((num_tokens, num_chosen, num_out), dtype=x.dtype, device=x.device)
    if sums.numel():
        shape = fp8_tile_shape(cdiv(ids.numel(), num_matrices), group, x.itemsize)
        order, tiles = sort_pairs(ids.contiguous(), num_matrices, shape.num_rows)
        values, num_shared = read_rows(x, ids)
        _grouped_group_gemm[(cdiv(num_out, shape.num_outs), len(tiles))](
            RowsArgs(values, values.stride(0), num_shared, None),
            stack,
            order,
            tiles,
            sums,
            num_out,
            num_lines,
            width,
            group,
            *shape.sizes(width),
            num_warps=shape.num_warps,
            **({"enable_fp_fusion": False} if exact else {}),
            **pdl_options(x),
        )
    if epilogue.activation is None:
        return sums
    y = activate(sums.flatten(0, 1), epilogue.activation, epilogue.gated)
    return y.view(num_tokens, num_chosen, y.shape[1])


@grouped_fp8_group_product.impl("cuda", exact=False)
def _body(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    group: int,
    ids: Tensor,
    num_matrices: int,
    epilogue: Epilogue = NO_EPILOGUE,
) -> Tensor:
    return _multiply(x, StackArgs(codes, scale, epilogue.bias), group, ids, num_matrices, epilogue, exact=False)


@grouped_fp8_group_product.impl("cuda", exact=True)
def _exact_body(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    group: int,
    ids: Tensor,
    num_matrices: int,
    epilogue: Epilogue = NO_EPILOGUE,
) -> Tensor:
    """Sums are one chain in any tile; only what the compiler may contract differs."""
    return _multiply(x, StackArgs(codes, scale, epilogue.bias), group, ids, num_matrices, epilogue, exact=True)
