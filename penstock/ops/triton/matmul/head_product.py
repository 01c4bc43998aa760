from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.matmul.head_linear import head_product
from penstock.ops.triton.launch import dot_precision, has_large_smem, pdl_options, wait_for_previous
from penstock.ops.triton.matmul.chain import sum_chain
from penstock.ops.triton.sizes import cdiv
from penstock.ops.triton.tuning import grouped_tile


@triton.jit(do_not_specialize=["num_rows"])
def _head_product(
    x,
    weight,
    out,
    x_row,
    x_head,
    num_rows,
    num_heads,
    num_out,
    width,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """OUTS outputs of one head by ROWS rows; each sum is one chain over the inputs, in order."""
    wait_for_previous(PDL)
    h = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    sums = sum_chain(
        weight + (h * num_out + tl.minimum(n, num_out - 1)) * width,
        x + t.to(tl.int64) * x_row + h * x_head,
        t < num_rows,
        width,
        OUTS,
        ROWS,
        BLOCK,
        EVEN,
        STAGES,
        PRECISION,
        "",
    )
    place = out + (t.to(tl.int64)[None, :] * num_heads + h) * num_out + n[:, None]
    tl.store(place, sums.to(out.dtype.element_ty), mask=(t < num_rows)[None, :] & (n < num_out)[:, None])


@head_product.impl("cuda", exact=True)
def _body(x: Tensor, weight: Tensor) -> Tensor:
    (num_rows, num_heads, width), num_out = x.shape, weight.shape[1]
    out = torch.empty((num_rows, num_heads, num_out), dtype=x.dtype, device=x.device)
    if out.numel():
        x = x if x.stride(2) == 1 else x.contiguous()
        tile = grouped_tile(num_rows, 1, x.itemsize, has_large_smem(x.device))
        _head_product[(cdiv(num_rows, tile.num_rows), cdiv(num_out, tile.num_outs), num_heads)](
            x,
            weight,
            out,
            x.stride(0),
            x.stride(1),
            num_rows,
            num_heads,
            num_out,
            width,
            *tile.sizes(width),
            dot_precision(x.dtype),
            num_warps=tile.num_warps,
            enable_fp_fusion=False,
            **pdl_options(x),
        )
    return out
