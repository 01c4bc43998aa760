from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.product import defers, is_few, product
from penstock.ops.triton.activation import activate
from penstock.ops.triton.cublas import multiplied
from penstock.ops.triton.few_rows import few_rows
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.numbers import activated
from penstock.ops.triton.rms_norm import normed
from penstock.ops.triton.sizes import cdiv, power_of_2

NARROW = 1024  # inputs


@triton.jit
def _read(place, at, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Weights that are read once; those beyond the width are 0."""
    if BLOCK > WIDTH:
        w = tl.load(place, mask=(at < WIDTH)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        w = tl.load(place, eviction_policy="evict_first")
    return w


@triton.jit
def _gemv(
    x,
    weight,
    scale,
    bias,
    residual,
    norm,
    out,
    num_out,
    eps,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row times ROWS outputs. All weights of a program, or its first block of them, are on their way before x is
    there; the norm's factor is applied to the sums, so that x is read once."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, num_out - 1).to(tl.int64)  # beyond the last it is the last once more
    at = tl.arange(0, BLOCK)
    place = weight + row[:, None] * WIDTH + at[None, :]
    second = place + num_out.to(tl.int64) * WIDTH
    w = _read(place, at, WIDTH, BLOCK)
    u = w
    if GATED:
        u = _read(second, at, WIDTH, BLOCK)
    factors = 1.0
    if scale is not None:
        factors = tl.load(scale + row)
    await_others(EARLY)
    values = tl.load(x + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    squares = values * values
    if norm is not None:
        values *= tl.load(norm + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    sums = w.to(tl.float32) * values[None, :]
    ups = sums
    if GATED:
        ups = u.to(tl.float32) * values[None, :]
    for start in tl.static_range(BLOCK, WIDTH, BLOCK):
        inside = start + at < WIDTH
        w = tl.load(place + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        values = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
        squares += values * values
        if norm is not None:
            values *= tl.load(norm + start + at, mask=inside, other=0.0).to(tl.float32)
        sums += w.to(tl.float32) * values[None, :]
        if GATED:
            u = tl.load(second + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            ups += u.to(tl.float32) * values[None, :]
    y = tl.sum(sums, 1)
    ups_sum = tl.sum(ups, 1)
    if NORMED:
        factor = tl.rsqrt(tl.sum(squares) / WIDTH + eps)
        y *= factor
        ups_sum *= factor
    if scale is not None:
        y *= factors
        if GATED:
            ups_sum *= tl.load(scale + num_out + row)
    if bias is not None:
        y += tl.load(bias + row).to(tl.float32)
        if GATED:
            ups_sum += tl.load(bias + num_out + row).to(tl.float32)
    y = activated(y, KIND)
    if GATED:
        y *= ups_sum
    if residual is not None:
        y += tl.load(residual + row).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < num_out)


def _gemv_shape(width: int, num_out: int, itemsize: int) -> tuple[int, int, int]:
    """Outputs and inputs of a program, and its warps, measured on an H200."""
    block = power_of_2(width)
    if block > 4096:
        return (2, 1024, 4) if itemsize == 1 else (1, 1024, 4) if itemsize == 4 else (2, 2048, 4)
    if itemsize == 1:
        return 4, block, max(1, min(4, block // 1024))
    if itemsize == 4:
        return 1, block, max(1, min(16, block // 512))
    if block < 4096:
        return 4, block, 4 if block <= 1024 else 16
    return 2, block, 8


def one_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    gated: bool,
    norm: Tensor | None,
    eps: float,
    scale: Tensor | None = None,
) -> Tensor:
    """The product of one row, its weight's outputs times scale[O] where there is one. In a wide one reading gates and
    values at once is slower than a kernel for their activation."""
    if gated and weight.shape[1] > NARROW:
        y = _gated(one_row(x, weight, bias, None, None, False, norm, eps, scale), activation)
        return y if residual is None else residual.add_(y)
    num_out, width = weight.shape[0] // 2 if gated else weight.shape[0], weight.shape[1]
    out = torch.empty((1, num_out), dtype=x.dtype, device=x.device)
    rows, block, num_warps = _gemv_shape(width, num_out, weight.itemsize)
    rows = rows // 2 if gated and rows > 1 else rows
    _gemv[(cdiv(num_out, rows),)](
        x,
        weight,
        scale,
        bias,
        residual,
        norm,
        out,
        num_out,
        eps,
        eps > 0,
        gated,
        activation or "",
        width,
        rows,
        block,
        num_warps=num_warps,
        **early(x),
    )
    return out


def _gated(y: Tensor, activation: str | None) -> Tensor:
    gate, up = y.chunk(2, -1)
    return activate(y, activation, gated=True) if activation else gate * up


@product.impl("cuda", exact=False)
def _body(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """One row, or a few, by a kernel that takes in what stands before and after the product, more by cuBLAS."""
    if x.shape[0] == 1 and x.is_contiguous():
        return one_row(x, weight, bias, residual, activation, gated, norm, eps)
    if is_few(x, weight, norm):
        return few_rows(x, weight, bias, residual, activation, gated, eps)
    if gated and activation is not None and defers(x, norm, bias, eps):
        y = activate(multiplied(x, weight), activation, True, x, eps)
        return y if residual is None else residual.add_(y)
    y = normed(x, norm, eps) if eps > 0 else x
    if bias is None and residual is not None and not gated and activation is None:
        return torch.addmm(residual, y, weight.t(), out=residual)
    y = multiplied(y, weight) if bias is None else torch.addmm(bias.to(y.dtype), y, weight.t())
    if gated:
        y = _gated(y, activation)
    elif activation is not None:
        y = activate(y, activation, gated=False)
    return y if residual is None else residual.add_(y)
