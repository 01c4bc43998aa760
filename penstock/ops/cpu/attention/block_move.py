from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.attention.block_move import block_move
from penstock.ops.cpu.runtime.library import Kernel, as_integers

_kernel = Kernel("block_move", "pnnpn")


@block_move.impl("cpu", exact=True)
def _block_move(blocks: Tensor, moves: Tensor) -> None:
    moves = as_integers(moves, torch.int64)
    if not blocks.is_contiguous() or blocks.dtype is not torch.int32:
        raise ValueError(f"blocks must be contiguous int32, not {blocks.dtype} with strides {blocks.stride()}")
    _kernel(blocks.data_ptr(), blocks.shape[0], blocks.shape[1], moves.data_ptr(), moves.shape[0])
