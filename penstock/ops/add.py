"""A sum of two streams, or of a stream and one row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.example import normal
from penstock.ops.registry import Example, op
from penstock.ops.rows import EachRow


class _Rows(EachRow):
    """y has the rows of x, or is one row for all of them."""

    def take(self, example: Example, keep: list[int]) -> Example:
        y = example["y"]
        return super().take(example, keep) | {"y": y if y.dim() == 1 else y[keep]}


def _examples() -> Iterator[Example]:
    for seed, (num_rows, width) in enumerate([(0, 8), (1, 576), (3, 1), (5, 31), (13, 100), (70, 1100)]):
        x, y = normal(seed, num_rows, width), normal(seed + 100, num_rows, width)
        yield {"x": x, "y": y, "scale": 1.0}
        yield {"x": x, "y": normal(seed + 200, width), "scale": 0.22}
    wide = normal(9, 4, 96)
    yield {"x": wide[:, :32], "y": wide[:, 64:], "scale": -1.5}


@op(
    tolerance={torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3},
    examples=_examples,
    rows=_Rows("x"),
    rowwise=True,
)
def add(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """x[T, C] + scale · y, for y[T, C] or y[C]."""
    return (x.float() + scale * y.float()).to(x.dtype)
