"""At which positions recurrent states are kept: every few blocks, and at the last block boundary of the prompt."""

from __future__ import annotations

from penstock.engine.sequence import Sequence

STRIDE_BLOCKS = 4


def _last_in_prompt(sequence: Sequence, block_size: int) -> int:
    return (sequence.num_prompt - 1) // block_size * block_size


def next_snapshot(sequence: Sequence, block_size: int) -> int:
    """The first such position after `computed`: a step must not run past it."""
    stride = block_size * STRIDE_BLOCKS
    regular = (sequence.computed // stride + 1) * stride
    last = _last_in_prompt(sequence, block_size)
    return last if sequence.computed < last < regular else regular


def is_snapshot(sequence: Sequence, position: int, block_size: int) -> bool:
    if position == 0:
        return False
    return position == _last_in_prompt(sequence, block_size) or position % (block_size * STRIDE_BLOCKS) == 0
