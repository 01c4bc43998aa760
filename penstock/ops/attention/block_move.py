"""Copy blocks of a pool."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import op


@op(tolerance={torch.float32: 0.0}, rowwise=True)
def block_move(blocks: Tensor, moves: Tensor) -> None:
    """Copy block moves[i, 0] of blocks[N, W] int32 to block moves[i, 1], one i after the other; a source under 0 is
    padding."""
    for source, target in moves.tolist():
        if source >= 0:
            blocks[target] = blocks[source]
