"""GEMM of a few rows, faster than cuBLAS for some thousand outputs: it starts before the previous kernel has ended."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.matmul.epilogue import Epilogue
from penstock.ops.triton.launch import has_large_smem, pdl_options, wait_for_previous
from penstock.ops.triton.matmul.epilogue import EpilogueArgs, apply_epilogue, epilogue_args
from penstock.ops.triton.sizes import cdiv, power_of_2
from penstock.ops.triton.tuning import SKINNY_TILE_INPUTS, SKINNY_TILE_OUTPUTS, skinny_stages


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_gemm(
    x,
    weight,
    out,
    epilogue,
    num_rows,
    num_out,
    x_row,
    eps,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """COLS outputs of all rows; gated, half of them gates and half of them ups. The norm's factors are applied to the
    sums, so that x is read once."""
    wait_for_previous(PDL)
    m, at, c = tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.arange(0, COLS)
    OWN: tl.constexpr = COLS // 2 if GATED else COLS
    n = tl.program_id(0) * OWN + tl.arange(0, OWN)
    row = tl.minimum(tl.program_id(0) * OWN + c % OWN, num_out - 1).to(tl.int64)  # beyond the last the last again
    row += c // OWN * num_out
    there = (m < num_rows)[:, None]
    place = weight + row[:, None] * WIDTH + at[None, :]
    sums = tl.zeros((COLS, ROWS), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(0, WIDTH, BLOCK, num_stages=STAGES):
        inside = (start + at < WIDTH)[None, :]
        values = tl.load(x + m[:, None] * x_row + start + at[None, :], mask=there & inside, other=0.0)
        w = tl.load(place + start, mask=inside, other=0.0)
        sums = tl.dot(w, tl.trans(values), sums)
        if NORMED:
            squares += tl.sum(values.to(tl.float32) * values.to(tl.float32), 1)
    if NORMED:
        sums *= tl.rsqrt(squares / WIDTH + eps)[None, :]
    if epilogue.bias is not None:
        sums += tl.load(epilogue.bias + row).to(tl.float32)[:, None]
    y = sums
    ups = sums
    if GATED:
        y, ups = tl.split(tl.permute(tl.reshape(sums, (2, OWN, ROWS)), (1, 2, 0)))
    wanted = (m < num_rows)[None, :] & (n < num_out)[:, None]
    rest = EpilogueArgs(None, epilogue.residual, epilogue.residual_row)
    y = apply_epilogue(
        y, ups, rest, None, None, m[None, :] * epilogue.residual_row + n[:, None], wanted, num_out, GATED, KIND, ""
    )
    tl.store(out + m[None, :] * num_out + n[:, None], y.to(out.dtype.element_ty), mask=wanted)


def skinny_gemm(x: Tensor, weight: Tensor, epilogue: Epilogue, eps: float) -> Tensor:
    """Multiply as `product` without a norm's weights, into the residual if there is one."""
    num_rows, width = x.shape
    num_out = epilogue.num_results(weight.shape[0])
    residual = None if epilogue.residual is None else epilogue.residual.contiguous()
    out = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device) if residual is None else residual
    _skinny_gemm[(cdiv(weight.shape[0], SKINNY_TILE_OUTPUTS),)](
        x,
        weight,
        out,
        epilogue_args(epilogue._replace(residual=residual)),
        num_rows,
        num_out,
        x.stride(0),
        eps,
        eps > 0,
        epilogue.gated,
        epilogue.activation or "",
        width,
        max(16, power_of_2(num_rows)),
        SKINNY_TILE_OUTPUTS,
        SKINNY_TILE_INPUTS,
        skinny_stages(width, has_large_smem(x.device)),
        num_warps=4,
        **pdl_options(x),
    )
    return out
