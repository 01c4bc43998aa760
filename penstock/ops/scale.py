"""A stream times a constant."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.example import normal
from penstock.ops.registry import Example, op


def _examples() -> Iterator[Example]:
    for seed, shape in enumerate([(0, 8), (1, 1000), (3, 31), (2, 5, 7), (11, 9000)]):
        yield {"x": normal(seed, *shape), "factor": 24.0 if seed % 2 else 0.1}


@op(tolerance={torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}, examples=_examples, rowwise=True)
def scale(x: Tensor, factor: float) -> Tensor:
    """x · factor."""
    return (x.float() * factor).to(x.dtype)
