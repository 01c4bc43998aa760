"""Root-mean-square normalization."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.example import normal
from penstock.ops.registry import Example, op
from penstock.ops.rows import EachRow


def _examples() -> Iterator[Example]:
    for seed, shape in enumerate([(0, 8), (1, 576), (3, 1), (5, 31), (17, 100), (7, 3, 64), (2, 5, 20), (300, 128)]):
        yield {
            "x": normal(seed, *shape, scale=3.0),
            "weight": normal(seed + 100, shape[-1]),
            "eps": 1e-5,
            "residual": normal(seed + 200, *shape) if seed % 2 else None,
        }
    yield {"x": torch.zeros(2, 16), "weight": normal(9, 16), "eps": 1e-6, "residual": None}
    yield {
        "x": normal(10, 6, 4, 96).transpose(0, 1)[:, :, 16:80],
        "weight": normal(11, 64),
        "eps": 1e-6,
        "residual": None,
    }
    yield {"x": normal(12, 9, 48), "weight": normal(13, 48), "eps": 1e-6, "residual": normal(14, 48, 9).t()}


@op(
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},
    examples=_examples,
    rows=EachRow("x", "residual"),
)
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, added to the residual if there is one."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight
    return (y if residual is None else residual + y).to(x.dtype)
