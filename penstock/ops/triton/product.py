from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.activation import activation as activate
from penstock.ops.activation import gated_activation
from penstock.ops.product import product
from penstock.ops.triton.numbers import activated
from penstock.ops.triton.rms_norm import normed


@triton.jit
def _gemv(x, weight, bias, residual, norm, out, num_out, width, eps, NORMED: tl.constexpr, GATED: tl.constexpr,
          KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """One row times ROWS outputs. The norm's factor is applied to the sums, so that x is read once."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # An output beyond the last is the last once more: loads without a mask are wider.
    row = tl.minimum(n, num_out - 1).to(tl.int64)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    ups = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        if WHOLE:
            values = tl.load(x + at).to(tl.float32)
            w = tl.load(weight + row[:, None] * width + at[None, :], eviction_policy="evict_first")
        else:
            inside = at < width
            values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(weight + row[:, None] * width + at[None, :], mask=inside[None, :], other=0.0)
        if NORMED:
            squares += values * values
        if norm is not None:
            values *= tl.load(norm + at, mask=at < width, other=0.0).to(tl.float32)
        sums += w.to(tl.float32) * values[None, :]
        if GATED:
            up = weight + (row + num_out)[:, None] * width + at[None, :]
            if WHOLE:
                w = tl.load(up, eviction_policy="evict_first")
            else:
                w = tl.load(up, mask=(at < width)[None, :], other=0.0)
            ups += w.to(tl.float32) * values[None, :]
    y = tl.sum(sums, 1)
    u = tl.sum(ups, 1)
    if NORMED:
        factor = tl.rsqrt(tl.sum(squares) / width + eps)
        y *= factor
        u *= factor
    if bias is not None:
        y += tl.load(bias + row).to(tl.float32)
        if GATED:
            u += tl.load(bias + num_out + row).to(tl.float32)
    y = activated(y, KIND)
    if GATED:
        y *= u
    if residual is not None:
        y += tl.load(residual + row).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < num_out)


def _shape(width: int, num_out: int) -> tuple[int, int, int]:
    """Outputs a program, inputs at a time, warps: measured on an H200."""
    block = min(2048, triton.next_power_of_2(width))
    if width > 1024:
        return 1, block, 4
    return (4 if num_out >= 4096 else 1 if num_out < 2048 else 2), block, 4


def _one_row(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None,
             gated: bool, norm: Tensor | None, eps: float) -> Tensor:
    width = weight.shape[1]
    num_out = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((1, num_out), dtype=x.dtype, device=x.device)
    rows, block, warps = _shape(width, num_out)
    _gemv[(triton.cdiv(num_out, rows),)](x, weight, bias, residual, norm, out, num_out, width, eps, eps > 0, gated,
                                         activation or "", rows, block, width % block == 0, num_warps=warps)
    return out


@product.impl("cuda", exact=False)
def _body(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
          activation: str | None = None, gated: bool = False, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    if x.shape[0] == 1 and x.is_contiguous():
        return _one_row(x, weight, bias, residual, activation, gated, norm, eps)
    y = normed(x, norm, eps) if eps > 0 else x
    if bias is None and residual is not None and not gated and activation is None:
        return torch.addmm(residual, y, weight.t(), out=residual)
    y = torch.mm(y, weight.t()) if bias is None else torch.addmm(bias.to(y.dtype), y, weight.t())
    if gated:
        y = gated_activation(y, activation) if activation else y.chunk(2, -1)[0] * y.chunk(2, -1)[1]
    elif activation is not None:
        y = activate(y, activation)
    return y if residual is None else residual.add_(y)
