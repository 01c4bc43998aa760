"""Make the inputs of a decode step on the device, from its tensors of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import op

ROW, ID, POSITION = 0, 1, 2  # of `numbers`; then for each group an index into the row's table, and its block
NUM_COMMON = 3


@op(tolerance={torch.float32: 0.0})
def single_inputs(
    numbers: Tensor,
    last: Tensor,
    table: Tensor,
    group: int,
    block_size: int,
    ids: Tensor,
    positions: Tensor,
    lengths: Tensor,
    slots: Tensor | None,
    step_table: Tensor,
) -> None:
    """Fill in ids, positions, lengths and slots [S] and the first blocks of step_table[S, B] from numbers[3 + 2 G, S]
    int32, the last token of every row and its blocks table[R, B] in this group.

    An id of -1 stands for the row's last token. A new block is entered into the table first; index -1 means none. A
    position of -1 is a padding row: its length is 0 and its slot -1. A recurrent group has no slots, and its whole
    table is filled in: with -1, the pool's padding block, for a padding row.
    """
    rows, given, where = (numbers[i].long() for i in (ROW, ID, POSITION))
    index, block = (numbers[NUM_COMMON + 2 * group + i].long() for i in (0, 1))
    new = index >= 0
    table[rows[new], index[new]] = block[new].to(torch.int32)
    ids.copy_(torch.where(given >= 0, given, last[rows].clamp(min=0)))
    positions.copy_(where.clamp(min=0))
    lengths.copy_((where + 1).to(torch.int32))
    if slots is None:
        step_table.copy_(torch.where(where[:, None] >= 0, table[rows], -1))
        return
    found = table[rows, positions // block_size].long() * block_size + positions % block_size
    slots.copy_(torch.where(where >= 0, found, -1))
    for s, length in enumerate(lengths.tolist()):
        num_blocks = -(-length // block_size)
        step_table[s, :num_blocks] = table[rows[s], :num_blocks]
