"""Rows of a matrix held as panels, so that a tied output head shares its storage."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.matmul.linear import PANEL
from penstock.ops.registry import op


@op(tolerance={torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}, rowwise=True)
def embedding(ids: Tensor, panels: Tensor, width: int) -> Tensor:
    """Rows ids[T] of the [O, C] matrix packed into panels → [T, C] float32, C = width."""
    if panels.shape[1] != width:
        raise ValueError(f"panels hold rows of {panels.shape[1]} values, not of width={width}")
    return panels[ids // PANEL, :, ids % PANEL].float()
