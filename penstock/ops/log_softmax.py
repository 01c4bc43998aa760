"""Log probabilities of logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.example import normal
from penstock.ops.registry import Example, op


def _examples() -> Iterator[Example]:
    for seed, shape in enumerate([(0, 8), (1, 49152), (3, 1), (5, 31), (7, 1000)]):
        yield {"x": normal(seed, *shape, scale=5.0)}
    masked = normal(9, 4, 100)
    masked[:, 3:90] = -torch.inf
    yield {"x": masked}
    yield {"x": normal(10, 2, 33) * 1e4}


@op(tolerance={torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}, examples=_examples)
def log_softmax(x: Tensor) -> Tensor:
    """x - log(sum(exp(x))) over the last dimension of x[S, V]."""
    return torch.log_softmax(x.float(), dim=-1).to(x.dtype)
