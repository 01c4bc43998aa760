from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.layer_norm import layer_norm
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.rms_norm import MOST_VALUES, rows_of
from penstock.ops.triton.sizes import power_of_2


@triton.jit
def _layer_norm(
    x,
    weight,
    bias,
    residual,
    out,
    x_row,
    x_head,
    residual_row,
    residual_head,
    num_heads,
    width,
    eps,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_others(EARLY)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < width
    y = tl.load(x + row * x_row + head * x_head + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(inside, y - tl.sum(y) / width, 0.0)
    y = y * tl.rsqrt(tl.sum(y * y) / width + eps)
    y *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        y += tl.load(residual + row * residual_row + head * residual_head + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + (row * num_heads + head) * width + at, y.to(out.dtype.element_ty), mask=inside)


@layer_norm.impl("cuda", exact=True)
def _body(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    if width > MOST_VALUES:
        raise ValueError(f"a norm over {width} values is over {MOST_VALUES}")
    if not out.numel():
        return out
    given, added = rows_of(x), None if residual is None else rows_of(residual)
    block = power_of_2(width)
    _layer_norm[given.shape[:2]](
        given,
        weight,
        bias,
        added,
        out,
        given.stride(0),
        given.stride(1),
        0 if added is None else added.stride(0),
        0 if added is None else added.stride(1),
        given.shape[1],
        width,
        eps,
        block,
        num_warps=min(16, max(1, block // 512)),
        **early(x),
    )
    return out
