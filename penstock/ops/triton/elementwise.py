from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.elementwise import SWIGLU_OAI, activation, add, find_activation, gated_activation, scale, softcap
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.numbers import apply_activation, apply_gate, norm_factor, tanh
from penstock.ops.triton.sizes import cdiv, norm_block
from penstock.ops.triton.tuning import ELEMENTWISE_BLOCK, WIDE_ELEMENTWISE_BLOCK, WIDE_ROW


@triton.jit
def _add(x, y, out, x_row, y_row, width, scale, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    a = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(y + row * y_row + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (a + scale * b).to(out.dtype.element_ty), mask=inside)


@add.impl("cuda", exact=True)
def _add_body(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    num_rows, width = x.shape
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if out.numel():
        x, y = (one if one.stride(-1) == 1 else one.contiguous() for one in (x, y))
        y_row = 0 if y.dim() == 1 else y.stride(0)
        grid = num_rows, cdiv(width, ELEMENTWISE_BLOCK)
        _add[grid](x, y, out, x.stride(0), y_row, width, scale, ELEMENTWISE_BLOCK, num_warps=4, **pdl_options(x))
    return out


@triton.jit
def _scale(x, out, size, factor, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) * factor
    tl.store(out + at, y.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def _softcap(x, out, size, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = cap * tanh(tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) / cap)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=at < size)


def _launch_flat(kernel: Any, x: Tensor, number: float) -> Tensor:
    """Run a kernel of x and one number over all elements of x."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (cdiv(out.numel(), ELEMENTWISE_BLOCK),)
        kernel[grid](x.contiguous(), out, out.numel(), number, ELEMENTWISE_BLOCK, num_warps=4, **pdl_options(x))
    return out


@scale.impl("cuda", exact=True)
def _scale_body(x: Tensor, factor: float) -> Tensor:
    return _launch_flat(_scale, x, factor)


@softcap.impl("cuda", exact=True)
def _softcap_body(x: Tensor, cap: float) -> Tensor:
    return _launch_flat(_softcap, x, cap)


@triton.jit
def _activation(
    x,
    out,
    source,
    x_row,
    width,
    source_row,
    source_width,
    eps,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Issue all loads before the first value is used."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    y = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    ups = y
    if GATED:
        ups = tl.load(x + row * x_row + width + at, mask=inside, other=0.0).to(tl.float32)
    if source is not None:
        factor = norm_factor(source + row * source_row, source_width, eps, NORM_BLOCK)
        y *= factor
        ups *= factor
    if GATED:
        y = apply_gate(y, ups, KIND)
    else:
        y = apply_activation(y, KIND)
    tl.store(out + row * width + at, y.to(out.dtype.element_ty), mask=inside)


def activate(x: Tensor, kind: str, gated: bool, source: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Apply an activation. With `source`, x are sums over its rows before their RMS norm: the norm's factor is applied
    first."""
    if not gated or kind != SWIGLU_OAI:
        find_activation(kind)
    width = x.shape[1] // 2 if gated else x.shape[1]
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    if out.numel():
        x = x if x.stride(1) == 1 else x.contiguous()
        block = WIDE_ELEMENTWISE_BLOCK if width >= WIDE_ROW else ELEMENTWISE_BLOCK
        row, size = (0, 0) if source is None else (source.stride(0), source.shape[1])
        _activation[x.shape[0], cdiv(width, block)](
            x,
            out,
            source,
            x.stride(0),
            width,
            row,
            size,
            eps,
            gated,
            kind,
            block,
            norm_block(size),
            num_warps=block // 256,
            **pdl_options(x),
        )
    return out


@activation.impl("cuda", exact=True)
def _activation_body(x: Tensor, kind: str) -> Tensor:
    return activate(x, kind, gated=False)


@gated_activation.impl("cuda", exact=True)
def _gated_activation_body(x: Tensor, kind: str) -> Tensor:
    y = activate(x.flatten(0, -2), kind, gated=True)
    return y.view(*x.shape[:-1], y.shape[1])
