from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention.block_move import block_move
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.sizes import cdiv
from penstock.ops.triton.tuning import ELEMENTWISE_BLOCK


@triton.jit(do_not_specialize=["num_moves"])
def _block_move(blocks, moves, num_moves, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program moves the same columns of every block, in order, so that no program waits for another."""
    wait_for_previous(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    for i in range(num_moves):
        source = tl.load(moves + 2 * i)
        if source >= 0:
            values = tl.load(blocks + source * width + at, mask=inside, other=0)
            tl.store(blocks + tl.load(moves + 2 * i + 1) * width + at, values, mask=inside)


@block_move.impl("cuda", exact=True)
def _body(blocks: Tensor, moves: Tensor) -> None:
    """Launches are remembered by `num_moves`: pad `moves` to a few sizes."""
    if len(moves):
        grid = (cdiv(blocks.shape[1], ELEMENTWISE_BLOCK),)
        _block_move[grid](
            blocks,
            moves.contiguous(),
            moves.shape[0],
            blocks.shape[1],
            ELEMENTWISE_BLOCK,
            num_warps=4,
            **pdl_options(blocks),
        )
