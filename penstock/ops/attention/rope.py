"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import op


@op(tolerance={torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}, rowwise=True)
def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first R of D dimensions of x[T, H, D], i with i + R/2, by row positions[t] of cos and sin [M, R/2].
    Interleaved, 2 i is rotated with 2 i + 1."""
    half = cos.shape[1]
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    y = x.float()
    if interleaved:
        a, b, rest = y[..., 0 : 2 * half : 2], y[..., 1 : 2 * half : 2], y[..., 2 * half :]
        turned = torch.stack([a * c - b * s, b * c + a * s], dim=-1).flatten(-2)
        return torch.cat([turned, rest], dim=-1).to(x.dtype)
    a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    return torch.cat([a * c - b * s, b * c + a * s, rest], dim=-1).to(x.dtype)
