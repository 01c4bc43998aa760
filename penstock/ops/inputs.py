"""The inputs of a step of single tokens, made on the device from what it knows of each row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.example import integers, permutation
from penstock.ops.registry import Example, op
from penstock.ops.rows import EachRow

ROW, ID, POSITION = 0, 1, 2  # of `numbers`; then for each group an index into the row's table, and its block
NUM_COMMON = 3


class _Written(EachRow):
    """What was written for each row."""

    def outputs(self, example: Example, result: object, keep: list[int]) -> Tensor:
        written = [example[name][keep].reshape(len(keep), -1) for name in ("ids", "positions", "lengths", "slots")]
        return torch.cat([x.to(torch.int64) for x in written], dim=1)

    def count(self, example: Example) -> int:
        return int(example["numbers"].shape[1])

    def take(self, example: Example, keep: list[int]) -> Example:
        some = {name: example[name][keep].clone() for name in ("ids", "positions", "lengths", "slots", "step_table")}
        return example | some | {"numbers": example["numbers"][:, keep].contiguous(), "table": example["table"].clone()}


def _examples() -> Iterator[Example]:
    for seed, (num, num_rows, width, block) in enumerate([(1, 3, 5, 16), (4, 9, 40, 4), (7, 8, 300, 1), (3, 3, 2, 32)]):
        numbers = torch.stack(
            [
                permutation(seed, num_rows)[:num],
                integers(seed + 1, 90, num) - 20,
                integers(seed + 2, width * block, num),
                integers(seed + 3, width, num),
                integers(seed + 4, 70, num),
            ]
        ).to(torch.int32)
        numbers[1].clamp_(min=-1)
        numbers[3, ::2] = -1
        if num > 2:
            numbers[2, 1] = -1
        yield {
            "numbers": numbers,
            "last": integers(seed + 5, 100, num_rows) - 1,
            "table": integers(seed + 6, 50, num_rows, width).to(torch.int32),
            "group": 0,
            "block_size": block,
            "ids": torch.zeros(num, dtype=torch.int64),
            "positions": torch.zeros(num, dtype=torch.int64),
            "lengths": torch.zeros(num, dtype=torch.int32),
            "slots": torch.zeros(num, dtype=torch.int64),
            "step_table": torch.full((num, width), -1, dtype=torch.int32),
        }


@op(tolerance={torch.float32: 0.0}, examples=_examples, rows=_Written("numbers"))
def single_inputs(
    numbers: Tensor,
    last: Tensor,
    table: Tensor,
    group: int,
    block_size: int,
    ids: Tensor,
    positions: Tensor,
    lengths: Tensor,
    slots: Tensor,
    step_table: Tensor,
) -> None:
    """From numbers[3 + 2 G, S] int32, the last token of every row and its blocks table[R, B] in this group, fill in
    ids, positions, lengths and slots [S] and the first blocks of step_table[S, B].

    An id of -1 stands for the row's last token. A new block is entered into the table first; index -1 means none. A
    position of -1 is nobody's: its length is 0 and its slot -1.
    """
    rows, given, where = (numbers[i].long() for i in (ROW, ID, POSITION))
    index, block = (numbers[NUM_COMMON + 2 * group + i].long() for i in (0, 1))
    new = index >= 0
    table[rows[new], index[new]] = block[new].to(torch.int32)
    ids.copy_(torch.where(given >= 0, given, last[rows].clamp(min=0)))
    positions.copy_(where.clamp(min=0))
    lengths.copy_((where + 1).to(torch.int32))
    found = table[rows, positions // block_size].long() * block_size + positions % block_size
    slots.copy_(torch.where(where >= 0, found, -1))
    for s, length in enumerate(lengths.tolist()):
        num_blocks = -(-length // block_size)
        step_table[s, :num_blocks] = table[rows[s], :num_blocks]
