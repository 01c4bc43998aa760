from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.fp8_product import FP8, LARGEST, LEAST, fp8_product
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.numbers import activated
from penstock.ops.triton.product import one_row
from penstock.ops.triton.sizes import cdiv, power_of_2

BLOCK = 1024
SHRUNK = 2.0**-9  # codes are multiplied as if they were so much smaller: their sums are within float16's range
_LARGEST, _LEAST, _GROWN = tl.constexpr(LARGEST), tl.constexpr(LEAST), tl.constexpr(SHRUNK**-2)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store_codes(y, out, scales, row, at, inside, width):
    """A row y as 8-bit floats, none over 448 by their scale. NaN and infinity pass into the scale."""
    scale = _larger(tl.reduce(tl.abs(y), 0, _larger), _LEAST) / _LARGEST
    tl.store(out + row * width + at, (y / scale).to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


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
    _store_codes(y, out, scales, row, at, inside, width)


@triton.jit
def _outputs(line, own, scale, bias, n, inside):
    """Some sums of one row's codes, times both scales. The weight's scales are read by every row: they alone are to be
    kept near."""
    y = tl.load(line + n, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    y *= own * tl.load(scale + n, mask=inside, other=0.0, eviction_policy="evict_last")
    if bias is not None:
        y += tl.load(bias + n, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return y


@triton.jit
def _finished(
    sums,
    scales,
    scale,
    bias,
    residual,
    out,
    new_scales,
    num_out,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sums of codes times both scales, and what follows the product; with new scales a whole row becomes codes."""
    await_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < num_out
    own = tl.load(scales + row) * _GROWN
    line = sums + row * num_out * (2 if GATED else 1)
    y = activated(_outputs(line, own, scale, bias, n, inside), KIND)
    if GATED:
        y *= _outputs(line, own, scale, bias, num_out + n, inside)
    if residual is not None:
        y += tl.load(residual + row * num_out + n, mask=inside, other=0.0).to(tl.float32)
    if new_scales is not None:
        _store_codes(tl.where(inside, y, 0.0), out, new_scales, row, n, inside, num_out)
    else:
        tl.store(out + row * num_out + n, y.to(out.dtype.element_ty), mask=inside)


def _whole_row(width: int) -> tuple[int, int]:
    """Values and warps of a program that holds a row: 16 for each thread, as long as there are threads."""
    block = power_of_2(width)
    return block, min(32, max(1, block // 512))


def rounded(x: Tensor, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Rows of x, normed, as codes and scales."""
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(x.shape[0], device=x.device)
    block, num_warps = _whole_row(x.shape[1])
    _rounded[(x.shape[0],)](
        x, norm, codes, scales, x.stride(0), x.shape[1], eps, eps > 0, block, num_warps=num_warps, **early(x)
    )
    return codes, scales


@lru_cache(maxsize=16)
def _shrunk(device: torch.device) -> Tensor:
    return torch.full((), SHRUNK, device=device)


def multiplied(codes: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of codes, by the library. With a scale per row and output it is slower than a kernel that applies them;
    without `use_fast_accum` it stops now and then to add up in more bits than the hardware does."""
    shrunk = _shrunk(codes.device)
    return torch._scaled_mm(codes, weight.t(), scale_a=shrunk, scale_b=shrunk, out_dtype=dtype, use_fast_accum=True)


def finish(
    sums: Tensor,
    scales: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    gated: bool,
) -> Tensor:
    """What follows a product of codes; it may be written where the residual lies."""
    num_out = sums.shape[1] // 2 if gated else sums.shape[1]
    out = residual = residual if residual is None else residual.contiguous()
    if out is None:
        out = torch.empty((sums.shape[0], num_out), dtype=sums.dtype, device=sums.device)
    _finished[(sums.shape[0], cdiv(num_out, BLOCK))](
        sums,
        scales,
        scale,
        bias,
        residual,
        out,
        None,
        num_out,
        gated,
        activation or "",
        BLOCK,
        num_warps=4,
        **early(sums),
    )
    return out


def finish_codes(
    sums: Tensor, scales: Tensor, scale: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """What follows a gated product, as codes and scales for the next one."""
    num_out = sums.shape[1] // 2
    codes = torch.empty((sums.shape[0], num_out), dtype=FP8, device=sums.device)
    new_scales = torch.empty(sums.shape[0], device=sums.device)
    block, num_warps = _whole_row(num_out)
    _finished[(sums.shape[0], 1)](
        sums,
        scales,
        scale,
        bias,
        None,
        codes,
        new_scales,
        num_out,
        True,
        activation,
        block,
        num_warps=num_warps,
        **early(sums),
    )
    return codes, new_scales


@fp8_product.impl("cuda", exact=False)
def _body(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    if x.shape[0] == 1 and x.is_contiguous():
        return one_row(x, weight, bias, residual, activation, gated, norm, eps, scale)
    codes, scales = rounded(x, norm, eps)
    return finish(multiplied(codes, weight, x.dtype), scales, scale, bias, residual, activation, gated)
