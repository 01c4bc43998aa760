"""A smooth bound on logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.example import normal
from penstock.ops.registry import Example, op


def _examples() -> Iterator[Example]:
    for seed, shape in enumerate([(0, 8), (1, 1000), (3, 31), (2, 5, 7), (11, 1000)]):
        yield {"x": normal(seed, *shape, scale=40.0), "cap": 30.0}
    yield {"x": torch.linspace(-0.1, 0.1, 999).view(9, 111), "cap": 1.0}


@op(tolerance={torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}, examples=_examples, rowwise=True)
def softcap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap)."""
    return (cap * torch.tanh(x.float() / cap)).to(x.dtype)
