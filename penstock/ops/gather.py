"""Some rows of a stream."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.example import integers, normal
from penstock.ops.registry import Example, op
from penstock.ops.rows import EachRow


def _examples() -> Iterator[Example]:
    for seed, (num_rows, width, count) in enumerate([(3, 8, 0), (1, 5, 1), (7, 576, 4), (50, 31, 90), (200, 600, 64)]):
        yield {"at": integers(seed, num_rows, count), "x": normal(seed, num_rows, width)}
    yield {"at": integers(9, 6, 4), "x": normal(9, 6, 64)[:, 16:40]}


@op(
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0},
    examples=_examples,
    rows=EachRow("at"),
    rowwise=True,
)
def gather(at: Tensor, x: Tensor) -> Tensor:
    """Rows at[M] of x[T, C] → [M, C]."""
    return x[at]
