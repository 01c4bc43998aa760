"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.example import integers, normal
from penstock.ops.registry import Example, op
from penstock.ops.rows import EachRow


def _examples() -> Iterator[Example]:
    shapes = [
        (0, 2, 8, 8),
        (1, 9, 64, 64),
        (5, 3, 80, 32),
        (13, 1, 6, 2),
        (7, 4, 96, 96),
        (3, 2, 30, 10),
        (70, 9, 64, 64),
    ]
    for seed, (num_tokens, num_heads, head_size, rotated) in enumerate(shapes):
        angles = normal(seed, 50, rotated // 2, scale=2.0)
        yield {
            "x": normal(seed + 100, num_tokens, num_heads, head_size),
            "positions": integers(seed, 50, num_tokens),
            "cos": angles.cos(),
            "sin": angles.sin(),
        }
    qkv = normal(50, 11, 5, 16)
    angles = normal(51, 20, 8)
    yield {"x": qkv[:, 1:4], "positions": integers(52, 20, 11), "cos": angles.cos(), "sin": angles.sin()}


@op(
    tolerance={torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3},
    examples=_examples,
    rows=EachRow("x", "positions"),
    rowwise=True,
)
def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R of D dimensions of x[T, H, D], i with i + R/2, by row positions[t] of cos and sin [M, R/2]."""
    half = cos.shape[1]
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    y = x.float()
    a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    return torch.cat([a * c - b * s, b * c + a * s, rest], dim=-1).to(x.dtype)
