"""Layer normalization."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.example import normal
from penstock.ops.registry import Example, op
from penstock.ops.rows import EachRow


def _examples() -> Iterator[Example]:
    for seed, shape in enumerate([(0, 8), (1, 384), (3, 1), (5, 31), (17, 100), (7, 3, 64), (200, 128)]):
        yield {
            "x": normal(seed, *shape, scale=3.0) + 1,
            "weight": normal(seed + 100, shape[-1]),
            "bias": normal(seed + 200, shape[-1]) if seed % 2 else None,
            "eps": 1e-5,
            "residual": normal(seed + 300, *shape) if seed % 3 else None,
        }


@op(
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},
    examples=_examples,
    rows=EachRow("x", "residual"),
)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(variance + eps) · weight + bias over the last dimension, added to the residual if any."""
    y = x.float()
    y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight
    y = y if bias is None else y + bias
    return (y if residual is None else residual + y).to(x.dtype)
