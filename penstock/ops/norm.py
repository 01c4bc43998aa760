"""Norms over the last dimension, with an optional residual added."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import op

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@op(tolerance=TOLERANCE)
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight, plus the residual if there is one."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight
    return (y if residual is None else residual + y).to(x.dtype)


@op(tolerance=TOLERANCE)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) · weight + bias, plus the residual if there is one."""
    y = x.float()
    y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight
    y = y if bias is None else y + bias
    return (y if residual is None else residual + y).to(x.dtype)
