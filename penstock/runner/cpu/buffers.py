"""The numbers of a CPU step, at fixed addresses, so that steps of one shape can be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from penstock.cache.group import Group
from penstock.engine.plan import Plan
from penstock.runner.cpu.trees import TreeBuffers, has_trees
from penstock.runner.rows import RunningRow
from penstock.runner.step import Step

MAX_TAPED_TOKENS = 64  # in larger steps Python costs little, and their shapes seldom return


class Shape(NamedTuple):
    """Steps of one shape make the same calls on the same buffers."""

    num_tokens: int
    num_sequences: int
    num_logits: int  # rows of logits wanted
    has_trees: bool = False
    has_adapters: bool = False


class Buffers:
    """Numbers of a step, at fixed addresses."""

    def __init__(
        self, num_tokens: int, num_sequences: int, groups: Sequence[Group], max_model_len: int, block_size: int
    ) -> None:
        self.block_size = block_size
        self.ids = np.zeros(num_tokens, dtype=np.int64)
        self.positions = np.zeros(num_tokens, dtype=np.int64)
        self.at = np.zeros(num_tokens, dtype=np.int64)  # tokens whose logits are wanted
        self.adapters = np.full((2, num_tokens), -1, dtype=np.int32)  # slots: of all tokens, of those wanted
        self.query_start = np.zeros(num_sequences + 1, dtype=np.int32)
        self.lengths = np.zeros(num_sequences, dtype=np.int32)
        self.slots = [np.zeros(num_tokens, dtype=np.int64) if group.is_paged else None for group in groups]
        widths = [group.table_width(max_model_len, block_size) for group in groups]
        self.tables = [np.full((num_sequences, width), -1, dtype=np.int32) for width in widths]
        self._at = torch.from_numpy(self.at)
        self._adapters = torch.from_numpy(self.adapters)
        self._whole = Step(
            torch.from_numpy(self.ids),
            torch.from_numpy(self.positions),
            [slots if slots is None else torch.from_numpy(slots) for slots in self.slots],
            [torch.from_numpy(table) for table in self.tables],
            torch.from_numpy(self.query_start),
            torch.from_numpy(self.lengths),
        )
        self._entered: list[tuple[RunningRow, int] | None] = [None] * num_sequences  # rows and versions of tables
        self._trees: TreeBuffers | None = None  # from the first on

    def fill(self, plan: Plan, rows: Sequence[RunningRow], at: Sequence[int], shift: int = 0) -> Shape:
        """Write the plan's rows, one after the other, and the tokens `at` whose logits are wanted. Each position gets
        the token `shift` positions later."""
        ids: list[int] = []
        positions: list[int] = []
        starts = [0]
        for s, (row, device) in enumerate(zip(plan.rows, rows)):
            begin = row.start
            end = begin + row.count
            known = device.inputs(row, shift)
            ids += known
            positions += range(begin, end)
            if -1 in known:
                raise RuntimeError(f"plan {plan.number} asks for tokens that its rows do not have")
            self._enter(s, device)
            for slots, table in zip(self.slots, device.tables):
                if slots is not None:
                    slots[starts[s] : len(ids)] = _slots(table, begin, end, self.block_size)
            starts.append(len(ids))
        num_tokens, num_sequences = len(ids), len(rows)
        self.ids[:num_tokens] = ids
        self.positions[:num_tokens] = positions
        self.at[: len(at)] = at
        self.query_start[: num_sequences + 1] = starts
        self.lengths[:num_sequences] = [row.start + row.count for row in plan.rows]
        has_adapters = self._enter_adapters(rows, starts, at)
        if not has_trees(plan):
            return Shape(num_tokens, num_sequences, len(at), has_adapters=has_adapters)
        if self._trees is None:
            width = max(MAX_TAPED_TOKENS, *(len(row.draft) for row in plan.rows))
            self._trees = TreeBuffers(len(self.ids), len(self.lengths), width)
        self._trees.fill(plan, self.positions, self.lengths)
        return Shape(num_tokens, num_sequences, len(at), True, has_adapters)

    def _enter_adapters(self, rows: Sequence[RunningRow], starts: Sequence[int], at: Sequence[int]) -> bool:
        """Write the slots of each row's adapters; False if none has any."""
        if all(row.adapter < 0 for row in rows):
            return False
        tokens, wanted = self.adapters
        for row, begin, end in zip(rows, starts, starts[1:]):
            tokens[begin:end] = row.adapter
        wanted[: len(at)] = tokens[self.at[: len(at)]]
        return True

    def _enter(self, s: int, device: RunningRow) -> None:
        """Write the row's tables, unless they are there already."""
        entered = self._entered[s]
        if entered is not None and entered[0] is device and entered[1] == device.version:
            return
        for tables, table in zip(self.tables, device.tables):
            count = min(len(table), tables.shape[1])
            tables[s, :count] = table[:count]
        self._entered[s] = (device, device.version)

    def step(self, shape: Shape) -> Step:
        step = self._whole.cut(shape.num_tokens, shape.num_sequences)
        if shape.has_adapters:
            step.adapters = self._adapters[0, : shape.num_tokens]
        if shape.has_trees:
            assert self._trees is not None
            self._trees.enter(step)
        return step

    def tokens_at(self, shape: Shape) -> torch.Tensor | None:
        """Return the tokens [M] whose logits are wanted; None for all."""
        return None if shape.num_logits == shape.num_tokens else self._at[: shape.num_logits]

    def adapters_at(self, shape: Shape) -> torch.Tensor | None:
        """Return the slots [M] of the adapters of those tokens; None if there are none."""
        return self._adapters[1, : shape.num_logits] if shape.has_adapters else None


def _slots(table: np.ndarray, begin: int, end: int, block_size: int) -> np.ndarray | int:
    if end - begin == 1:
        return int(table[begin // block_size]) * block_size + begin % block_size
    positions = np.arange(begin, end)
    return table[positions // block_size].astype(np.int64) * block_size + positions % block_size
