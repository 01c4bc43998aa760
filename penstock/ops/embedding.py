"""Rows of a matrix held as panels, so that a tied output head shares its storage."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.example import integers, normal
from penstock.ops.linear import PANEL, pack_panels
from penstock.ops.registry import Example, op


def _examples() -> Iterator[Example]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        shapes = [(0, 16, 8), (1, 1, 5), (7, 33, 64), (31, 100, 17), (600, 90, 64)]
        for seed, (num_ids, num_rows, width) in enumerate(shapes):
            yield {
                "ids": integers(seed, num_rows, num_ids),
                "width": width,
                "panels": pack_panels(normal(seed, num_rows, width, dtype=dtype)),
            }


@op(tolerance={torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}, examples=_examples, rowwise=True)
def embedding(ids: Tensor, panels: Tensor, width: int) -> Tensor:
    """Rows ids[T] of the [O, C] matrix packed into panels → [T, C] float32, C = width."""
    if panels.shape[1] != width:
        raise ValueError(f"panels hold rows of {panels.shape[1]} values, not of width={width}")
    return panels[ids // PANEL, :, ids % PANEL].float()
