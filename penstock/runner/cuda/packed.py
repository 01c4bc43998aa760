"""Mixed steps: prefill chunks and decode rows, sent to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from penstock import ops
from penstock.engine.plan import Output, Row
from penstock.ops.attention.inputs import NUM_COMMON
from penstock.ops.triton.tuning import MAX_PREFIXES
from penstock.runner.cuda.rows import RowTensors
from penstock.runner.rows import RunningRow
from penstock.runner.step import Step, ends_of

Numbers = TypeVar("Numbers", np.ndarray, torch.Tensor)
PER_TOKEN = 3 + 2 + 2  # ids, positions, sequences; logits wanted and their rows; tiles
PER_SEQUENCE = 4
ALIGNED = 4  # numbers of 4 bytes
NUM_PARTS = 11


def max_numbers(num_tokens: int, num_sequences: int, num_groups: int) -> int:
    """Bound the numbers that any step sends."""
    single = (NUM_COMMON + 2 * num_groups + 2 + 4) * num_sequences + 4 * MAX_PREFIXES
    padding = PER_SEQUENCE * (num_sequences + 2) + NUM_PARTS * ALIGNED
    return max(single, PER_TOKEN * num_tokens + 2 * num_sequences + padding)


@dataclass(frozen=True)
class MixedShape:
    """Sizes of a mixed step's inputs. Those of a captured step leave room: sequences and tiles without queries, tokens
    at position -1 and outputs at token -1 are padding."""

    num_tokens: int
    num_sequences: int
    num_single: int  # sequences of one query, which come first; others may be among them where lengths are padded
    num_outputs: int  # tokens that logits are wanted of
    num_tiles: int
    is_padded: bool = False

    def split(self, numbers: Numbers) -> list[Numbers]:
        """Views of ids, positions and sequences of the tokens; rows, lengths, first tokens and lengths as decode rows
        of the sequences; tokens and rows of the outputs; tiles, and how many of them have queries. Each begins where
        kernels may read 16 bytes at once: they are compiled anew for any other place."""
        sizes = [
            *[self.num_tokens] * 3,
            *[self.num_sequences] * 2,
            self.num_sequences + 1,
            self.num_sequences if self.is_padded else 0,
            *[self.num_outputs] * 2,
            2 * self.num_tiles,
            1,
        ]
        parts, begin = [], 0
        for size in sizes:
            parts.append(numbers[begin : begin + size])
            begin += -(-size // ALIGNED) * ALIGNED
        return parts

    @property
    def num_numbers(self) -> int:
        sizes = 3 * [self.num_tokens] + 2 * [self.num_sequences] + [self.num_sequences + 1]
        sizes += [self.num_sequences] * self.is_padded + 2 * [self.num_outputs] + [2 * self.num_tiles, 1]
        return sum(-(-size // ALIGNED) * ALIGNED for size in sizes)


@dataclass(frozen=True)
class MixedInputs:
    """A mixed step on the device. Logits are wanted of the tokens at[M] of `rows`; `ends` is left to the caller."""

    step: Step
    at: torch.Tensor
    owners: torch.Tensor  # the sequence of each output
    rows: torch.Tensor
    is_padded: bool

    def add_ends(self, num_kv_splits: int) -> torch.Tensor:
        """Let only the outputs pass the last layer; returns the lengths of their sequences."""
        at = self.at.clamp(min=0) if self.is_padded else self.at
        lengths = (self.step.places[at] + 1).int()
        if self.is_padded:
            lengths = lengths.masked_fill(self.at < 0, 0)
        self.step.ends = ends_of(self.step, at, self.owners, num_kv_splits, lengths)
        return lengths


def read_inputs(
    flat: torch.Tensor,
    shape: MixedShape,
    tensors: RowTensors,
    block_size: int,
    num_kv_splits: int,
    used: int | None,
    longest: int | None,
) -> MixedInputs:
    """Make a step of the numbers that `PackedRows.fill` has written; its tables have the first `used` blocks, and
    `longest` is the longest context with tiles."""
    ids, positions, owners, rows, lengths, starts, single_lengths, at, at_rows, tiles, num_tiles = shape.split(flat)
    rows, owners, places = rows.long(), owners.long(), positions.long()
    if shape.is_padded:
        places = places.clamp(min=0)
    ids = torch.where(ids >= 0, ids.long(), tensors.last[rows[owners]].clamp(min=0))
    tables = [
        table[:, : used if has_slots else None][rows] for table, has_slots in zip(tensors.tables, tensors.has_slots)
    ]
    slots: list[torch.Tensor | None] = []
    for table, has_slots in zip(tables, tensors.has_slots):
        found = table[owners, places // block_size].long() * block_size + places % block_size if has_slots else None
        slots.append(found.masked_fill(positions < 0, -1) if found is not None and shape.is_padded else found)
    work = ops.Work(
        shape.num_single,
        tiles.view(-1, 2) if shape.num_tiles else None,
        num_kv_splits,
        single_lengths=single_lengths if shape.is_padded else None,
        num_tiles=num_tiles,
        longest=longest,
    )
    at = at.long()
    step = Step(ids, places, slots, tables, starts, lengths, work)
    return MixedInputs(step, at, owners[at.clamp(min=0) if shape.is_padded else at], at_rows, shape.is_padded)


class PackedRows:
    """Rows of a mixed step, packed one after the other, decode rows first."""

    def __init__(self, rows: Sequence[Row], devices: Sequence[RunningRow], tile_tokens: int) -> None:
        self.rows, self.devices = rows, devices
        self._counts = counts = [row.count for row in rows]
        self.ends = np.cumsum(counts).tolist()
        self.num_tokens = self.ends[-1]
        self.num_single = next((s for s, count in enumerate(counts) if count != 1), len(counts))
        self.at: list[int] = []  # tokens whose logits are wanted
        self.at_rows: list[int] = []  # whose rows they are
        for row, end in zip(rows, self.ends):
            if row.output is Output.SAMPLE:
                if row.draft:
                    wanted = range(end - 1 - len(row.draft), end)
                    self.at += wanted
                    self.at_rows += [row.row] * len(wanted)
                else:
                    self.at.append(end - 1)
                    self.at_rows.append(row.row)
        self.tiles = [
            (s, first) for s in range(self.num_single, len(counts)) for first in range(0, counts[s], tile_tokens)
        ]
        self.tiles.sort(key=lambda tile: -rows[tile[0]].start - tile[1])  # what takes longest must not come last
        ends = [row.start + row.count for row in rows]
        self.longest, self.longest_prompt = max(ends), max(ends[self.num_single :], default=0)

    @property
    def shape(self) -> MixedShape:
        """Without padding."""
        return MixedShape(self.num_tokens, len(self.rows), self.num_single, len(self.at), len(self.tiles))

    def fill(self, numbers: np.ndarray, shape: MixedShape, padding_row: int) -> None:
        """Write the numbers of a step of this shape, which has room for the rows."""
        ids, positions, owners, rows, lengths, starts, single_lengths, at, at_rows, tiles, tile_count = shape.split(
            numbers
        )
        count, num_tokens = len(self.rows), self.num_tokens
        first = np.array([row.start for row in self.rows])
        counts = np.array(self._counts)
        ends = np.array(self.ends)
        self._fill_ids(ids)
        owners[:num_tokens] = np.repeat(np.arange(count), counts)
        positions[:num_tokens] = np.arange(num_tokens) + np.repeat(first - (ends - counts), counts)
        rows[:count] = [row.row for row in self.rows]
        lengths[:count] = first + counts
        starts[0], starts[1 : count + 1] = 0, ends
        num_at, num_tiles = len(self.at), len(self.tiles)
        tile_count[0] = num_tiles
        at[:num_at], at_rows[:num_at] = self.at, self.at_rows
        if num_tiles:
            tiles[: 2 * num_tiles] = np.array(self.tiles, dtype=np.int32).reshape(-1)
        if shape.is_padded:
            ids[num_tokens:], positions[num_tokens:], owners[num_tokens:] = 0, -1, 0
            rows[count:], lengths[count:], starts[count + 1 :] = padding_row, 0, num_tokens
            single_lengths[: self.num_single] = lengths[: self.num_single]
            single_lengths[self.num_single :] = 0
            at[num_at:], at_rows[num_at:] = -1, padding_row
            tiles[2 * num_tiles :: 2], tiles[2 * num_tiles + 1 :: 2] = count, 0  # a sequence without queries

    def _fill_ids(self, ids: np.ndarray) -> None:
        """Tokens at the rows' positions; -1 for one that only the device knows yet."""
        num = self.num_single
        ids[:num] = [
            known[row.start] if row.start < len(known := device.state.tokens) else -1
            for row, device in zip(self.rows[:num], self.devices)
        ]
        begin = num
        for row, device, end in zip(self.rows[num:], self.devices[num:], self.ends[num:]):
            ids[begin:end] = device.inputs(row)
            begin = end
