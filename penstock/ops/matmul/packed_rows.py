"""Embedding from a packed matrix, so that a tied output head shares its storage."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.matmul.packed import PackedWeight
from penstock.ops.registry import op


@op(tolerance={torch.float32: 0.0})
def packed_rows(ids: Tensor, weight: PackedWeight) -> Tensor:
    """Return rows ids[T] of the packed matrix → [T, C] float32."""
    return weight.unpack()[ids]
