"""The memory of a step's numbers: filled through numpy, read by kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from penstock.engine.plan import Plan
from penstock.runner.rows import DeviceRow
from penstock.runner.step import Step


class Shape(NamedTuple):
    """Steps of one shape make the same calls on the same places."""

    num_tokens: int
    num_sequences: int
    num_logits: int  # rows of logits wanted


class Buffers:
    """Room for the numbers of a step; they stay where they are."""

    def __init__(self, num_tokens: int, num_sequences: int, num_groups: int, table_width: int) -> None:
        self.ids = np.zeros(num_tokens, dtype=np.int64)
        self.positions = np.zeros(num_tokens, dtype=np.int64)
        self.at = np.zeros(num_tokens, dtype=np.int64)  # tokens whose logits are wanted
        self.query_start = np.zeros(num_sequences + 1, dtype=np.int32)
        self.lengths = np.zeros(num_sequences, dtype=np.int32)
        self.slots = [np.zeros(num_tokens, dtype=np.int64) for _ in range(num_groups)]
        self.tables = [np.full((num_sequences, table_width), -1, dtype=np.int32) for _ in range(num_groups)]
        self._at = torch.from_numpy(self.at)
        self._whole = Step(
            torch.from_numpy(self.ids),
            torch.from_numpy(self.positions),
            [torch.from_numpy(slots) for slots in self.slots],
            [torch.from_numpy(table) for table in self.tables],
            torch.from_numpy(self.query_start),
            torch.from_numpy(self.lengths),
        )
        self._entered: list[tuple[DeviceRow, int] | None] = [None] * num_sequences  # whose tables lie here

    def fill(self, plan: Plan, rows: Sequence[DeviceRow], at: Sequence[int], block_size: int) -> Shape:
        """Write down the plan's rows, one after the other, and which of their tokens' logits are wanted."""
        ids: list[int] = []
        positions: list[int] = []
        starts = [0]
        for s, (row, device) in enumerate(zip(plan.rows, rows)):
            begin = row.start
            end = begin + row.count
            ids += device.inputs(row)
            positions += range(begin, end)
            if len(ids) != len(positions):
                raise RuntimeError(f"plan {plan.number} asks for tokens that its rows do not have")
            self._enter(s, device)
            for slots, table in zip(self.slots, device.tables):
                slots[starts[s] : len(ids)] = _slots(table, begin, end, block_size)
            starts.append(len(ids))
        num_tokens, num_sequences = len(ids), len(rows)
        self.ids[:num_tokens] = ids
        self.positions[:num_tokens] = positions
        self.at[: len(at)] = at
        self.query_start[: num_sequences + 1] = starts
        self.lengths[:num_sequences] = [row.start + row.count for row in plan.rows]
        return Shape(num_tokens, num_sequences, len(at))

    def _enter(self, s: int, device: DeviceRow) -> None:
        """The row's tables, if others or older ones lie there."""
        entered = self._entered[s]
        if entered is not None and entered[0] is device and entered[1] == device.version:
            return
        for tables, table in zip(self.tables, device.tables):
            count = min(len(table), tables.shape[1])
            tables[s, :count] = table[:count]
        self._entered[s] = (device, device.version)

    def step(self, shape: Shape) -> Step:
        return self._whole.cut(shape.num_tokens, shape.num_sequences)

    def wanted(self, shape: Shape) -> torch.Tensor | None:
        """[M]: the tokens whose logits are wanted; None for every one."""
        return None if shape.num_logits == shape.num_tokens else self._at[: shape.num_logits]


def _slots(table: np.ndarray, begin: int, end: int, block_size: int) -> np.ndarray | int:
    if end - begin == 1:
        return int(table[begin // block_size]) * block_size + begin % block_size
    positions = np.arange(begin, end)
    return table[positions // block_size].astype(np.int64) * block_size + positions % block_size
