from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.norm import layer_norm, rms_norm
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.sizes import power_of_2
from penstock.ops.triton.tuning import MAX_NORM_WIDTH


@triton.jit
def _store_scaled(y, weight, bias, residual, out, at, inside):
    """Store y · weight + bias + residual; each but y may be missing."""
    if weight is not None:
        y *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm(
    x,
    weight,
    bias,
    residual,
    out,
    x_strides,
    residual_strides,
    num_heads,
    width,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < width
    y = tl.load(x + row * x_strides[0] + head * x_strides[1] + at, mask=inside, other=0.0).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y) / width + eps)
    if residual is not None:
        residual += row * residual_strides[0] + head * residual_strides[1]
    _store_scaled(y, weight, bias, residual, out + (row * num_heads + head) * width, at, inside)


@triton.jit
def _layer_norm(
    x,
    weight,
    bias,
    residual,
    out,
    x_strides,
    residual_strides,
    num_heads,
    width,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < width
    y = tl.load(x + row * x_strides[0] + head * x_strides[1] + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(inside, y - tl.sum(y) / width, 0.0)
    y = y * tl.rsqrt(tl.sum(y * y) / width + eps)
    if residual is not None:
        residual += row * residual_strides[0] + head * residual_strides[1]
    _store_scaled(y, weight, bias, residual, out + (row * num_heads + head) * width, at, inside)


def _by_head(x: Tensor) -> Tensor:
    """View x as [T, H, D] with a contiguous last dimension."""
    x = x.view(x.shape[0], 1, x.shape[1]) if x.dim() == 2 else x
    return x if x.stride(2) == 1 else x.contiguous()


def _launch(
    kernel: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None
) -> Tensor:
    """Norm each head of each row of x with one program."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    if width > MAX_NORM_WIDTH:
        raise ValueError(f"cannot norm rows of {width} values on a GPU: at most {MAX_NORM_WIDTH}; set device=cpu")
    if not out.numel():
        return out
    heads, added = _by_head(x), None if residual is None else _by_head(residual)
    block = power_of_2(width)
    kernel[heads.shape[:2]](
        heads,
        weight,
        bias,
        added,
        out,
        heads.stride()[:2],
        (0, 0) if added is None else added.stride()[:2],
        heads.shape[1],
        width,
        eps,
        block,
        num_warps=min(16, max(1, block // 512)),
        **pdl_options(x),
    )
    return out


def apply_norm(x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    """Apply `rms_norm`; without a weight all weights are 1."""
    return _launch(_rms_norm, x, weight, None, eps, residual)


@rms_norm.impl("cuda", exact=True)
def _rms_norm_body(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    return apply_norm(x, weight, eps, residual)


@layer_norm.impl("cuda", exact=True)
def _layer_norm_body(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor:
    return _launch(_layer_norm, x, weight, bias, eps, residual)
