from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.product import defers, product
from penstock.ops.triton.activation import activate
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.numbers import activated
from penstock.ops.triton.rms_norm import normed

NARROW = 1024            # inputs


@triton.jit
def _gemv(x, weight, scale, bias, residual, norm, out, num_out, width, eps, NORMED: tl.constexpr, GATED: tl.constexpr,
          KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One row times ROWS outputs. The norm's factor is applied to the sums, so that x is read once; weights are read
    one block ahead, the first before x is there."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, num_out - 1).to(tl.int64)       # beyond the last it is the last once more
    at = tl.arange(0, BLOCK)
    place = weight + row[:, None] * width + at[None, :]
    second = place + num_out.to(tl.int64) * width
    w = tl.load(place, mask=(at < width)[None, :], other=0.0, eviction_policy="evict_first")
    u = w
    if GATED:
        u = tl.load(second, mask=(at < width)[None, :], other=0.0, eviction_policy="evict_first")
    await_others(EARLY)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    ups = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        values = tl.load(x + start + at, mask=start + at < width, other=0.0).to(tl.float32)
        ahead = (start + BLOCK + at < width)[None, :]
        next_w = tl.load(place + start + BLOCK, mask=ahead, other=0.0, eviction_policy="evict_first")
        if NORMED:
            squares += values * values
        if norm is not None:
            values *= tl.load(norm + start + at, mask=start + at < width, other=0.0).to(tl.float32)
        sums += w.to(tl.float32) * values[None, :]
        w = next_w
        if GATED:
            next_u = tl.load(second + start + BLOCK, mask=ahead, other=0.0, eviction_policy="evict_first")
            ups += u.to(tl.float32) * values[None, :]
            u = next_u
    y = tl.sum(sums, 1)
    ups_sum = tl.sum(ups, 1)
    if NORMED:
        factor = tl.rsqrt(tl.sum(squares) / width + eps)
        y *= factor
        ups_sum *= factor
    if scale is not None:
        y *= tl.load(scale + row)
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


def _gemv_shape(width: int, num_out: int, itemsize: int) -> tuple[int, int]:
    """Outputs a program and inputs at a time, measured on an H200; 8-bit weights take two outputs for as many bytes."""
    block = min(2048, triton.next_power_of_2(width))
    if width > 1024:
        return 2 if itemsize == 1 else 1, block
    return (4 if num_out >= 4096 else 1 if num_out < 2048 else 2), block


def one_row(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None,
            gated: bool, norm: Tensor | None, eps: float, scale: Tensor | None = None) -> Tensor:
    """The product of one row, its weight's outputs times scale[O] where there is one. In a wide one reading gates and
    values at once is slower than a kernel for their activation."""
    if gated and weight.shape[1] > NARROW:
        y = _gated(one_row(x, weight, bias, None, None, False, norm, eps, scale), activation)
        return y if residual is None else residual.add_(y)
    num_out, width = weight.shape[0] // 2 if gated else weight.shape[0], weight.shape[1]
    out = torch.empty((1, num_out), dtype=x.dtype, device=x.device)
    rows, block = _gemv_shape(width, num_out, weight.itemsize)
    _gemv[(triton.cdiv(num_out, rows),)](x, weight, scale, bias, residual, norm, out, num_out, width, eps, eps > 0,
                                         gated, activation or "", rows, block, num_warps=4, **early(x))
    return out


def _gated(y: Tensor, activation: str | None) -> Tensor:
    gate, up = y.chunk(2, -1)
    return activate(y, activation, gated=True) if activation else gate * up


@product.impl("cuda", exact=False)
def _body(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
          activation: str | None = None, gated: bool = False, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """One row by a kernel that takes in what stands before and after the product, more by cuBLAS."""
    if x.shape[0] == 1 and x.is_contiguous():
        return one_row(x, weight, bias, residual, activation, gated, norm, eps)
    if gated and activation is not None and defers(x, norm, bias, eps):
        y = activate(torch.mm(x, weight.t()), activation, True, x, eps)
        return y if residual is None else residual.add_(y)
    y = normed(x, norm, eps) if eps > 0 else x
    if bias is None and residual is not None and not gated and activation is None:
        return torch.addmm(residual, y, weight.t(), out=residual)
    y = torch.mm(y, weight.t()) if bias is None else torch.addmm(bias.to(y.dtype), y, weight.t())
    if gated:
        y = _gated(y, activation)
    elif activation is not None:
        y = activate(y, activation, gated=False)
    return y if residual is None else residual.add_(y)
