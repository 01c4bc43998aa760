from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.fp8_product import FP8, LARGEST, LEAST, fp8_product
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.numbers import activated
from penstock.ops.triton.product import one_row

BLOCK = 1024
_LARGEST, _LEAST = tl.constexpr(LARGEST), tl.constexpr(LEAST)


@triton.jit
def _rounded(x, norm, out, scales, x_row, width, eps, NORMED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One row, normed, as 8-bit floats."""
    await_others(EARLY)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < width
    y = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        y *= tl.rsqrt(tl.sum(y * y) / width + eps)
    if norm is not None:
        y *= tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(y), 0), _LEAST) / _LARGEST
    codes = tl.minimum(tl.maximum(y / scale, -_LARGEST), _LARGEST)
    tl.store(out + row * width + at, codes.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _finished(sums, scales, scale, bias, residual, out, num_out, GATED: tl.constexpr, KIND: tl.constexpr,
              BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Sums of codes times both scales, and what follows the product."""
    await_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < num_out
    own = tl.load(scales + row)
    line = sums + row * num_out * (2 if GATED else 1)
    y = tl.load(line + n, mask=inside, other=0.0).to(tl.float32) * own * tl.load(scale + n, mask=inside, other=0.0)
    if bias is not None:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    y = activated(y, KIND)
    if GATED:
        up = tl.load(line + num_out + n, mask=inside, other=0.0).to(tl.float32) * own
        up *= tl.load(scale + num_out + n, mask=inside, other=0.0)
        if bias is not None:
            up += tl.load(bias + num_out + n, mask=inside, other=0.0).to(tl.float32)
        y *= up
    if residual is not None:
        y += tl.load(residual + row * num_out + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * num_out + n, y.to(out.dtype.element_ty), mask=inside)


def rounded(x: Tensor, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(x.shape[0], device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    _rounded[(x.shape[0],)](x, norm, codes, scales, x.stride(0), x.shape[1], eps, eps > 0, block,
                            num_warps=min(16, max(1, block // 512)), **early(x))
    return codes, scales


def finish(sums: Tensor, scales: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None,
           activation: str | None, gated: bool) -> Tensor:
    num_out = sums.shape[1] // 2 if gated else sums.shape[1]
    out = residual
    if out is None or not out.is_contiguous():
        out = torch.empty((sums.shape[0], num_out), dtype=sums.dtype, device=sums.device)
    _finished[(sums.shape[0], triton.cdiv(num_out, BLOCK))](
        sums, scales, scale, bias, residual, out, num_out, gated, activation or "", BLOCK, num_warps=4, **early(sums))
    return out


@fp8_product.impl("cuda", exact=False)
def _body(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
          activation: str | None = None, gated: bool = False, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Many rows by the library with scales of 1: with a scale per row it is slower than a kernel that applies them."""
    if x.shape[0] == 1 and x.is_contiguous():
        return one_row(x, weight, bias, residual, activation, gated, norm, eps, scale)
    codes, scales = rounded(x, norm, eps)
    one = torch.ones((), device=x.device)
    sums = torch._scaled_mm(codes, weight.t(), scale_a=one, scale_b=one, out_dtype=x.dtype)
    return finish(sums, scales, scale, bias, residual, activation, gated)
