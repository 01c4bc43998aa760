"""Mixed steps: prefill chunks and decode rows, sent to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock import ops
from penstock.engine.draft_tree import is_line
from penstock.engine.plan import Output, Plan, Row
from penstock.ops.attention.inputs import NUM_COMMON
from penstock.ops.triton.tuning import MAX_PREFIXES
from penstock.runner.cuda.rows import RowTensors
from penstock.runner.rows import RunningRow
from penstock.runner.step import Step, ends_of

PER_TOKEN = 3 + 2 + 2  # ids, positions, sequences; logits wanted and their rows; tiles
PER_SEQUENCE = 4
ALIGNED = 4  # numbers of 4 bytes


def max_numbers(num_tokens: int, num_sequences: int, num_groups: int) -> int:
    """Bound the numbers that any step sends."""
    single = (NUM_COMMON + 2 * num_groups + 2 + 4) * num_sequences + 4 * MAX_PREFIXES
    padding = PER_SEQUENCE * (num_sequences + 2) + len(MixedNumbers._fields) * ALIGNED
    return max(single, PER_TOKEN * num_tokens + 2 * num_sequences + padding)


class MixedNumbers(NamedTuple):
    """The parts of a mixed step's inputs, one after the other in one tensor or array; or their sizes."""

    ids: Any  # of the tokens
    positions: Any
    owners: Any  # the sequence of each token
    rows: Any  # of the sequences
    lengths: Any
    starts: Any  # the first token of each sequence, and the end
    single_lengths: Any  # lengths of decode rows, 0 for others; empty unless padded
    at: Any  # tokens that logits are wanted of
    at_rows: Any  # the row of each
    tiles: Any  # sequence and first query of each
    num_tiles: Any  # how many of them have queries


@dataclass(frozen=True)
class MixedShape:
    """Sizes of a mixed step's inputs. A captured step is padded: sequences and tiles without queries, tokens at
    position -1 and outputs at token -1."""

    num_tokens: int
    num_sequences: int
    num_single: int  # sequences of one query, which come first; others may be among them where lengths are padded
    num_outputs: int  # tokens that logits are wanted of
    num_tiles: int
    is_padded: bool = False

    @property
    def _sizes(self) -> MixedNumbers:
        return MixedNumbers(
            ids=self.num_tokens,
            positions=self.num_tokens,
            owners=self.num_tokens,
            rows=self.num_sequences,
            lengths=self.num_sequences,
            starts=self.num_sequences + 1,
            single_lengths=self.num_sequences if self.is_padded else 0,
            at=self.num_outputs,
            at_rows=self.num_outputs,
            tiles=2 * self.num_tiles,
            num_tiles=1,
        )

    def split(self, numbers: np.ndarray | torch.Tensor) -> MixedNumbers:
        """Views of each part. All begin where kernels may read 16 bytes at once: they are compiled anew for any other
        place."""
        parts, begin = [], 0
        for size in self._sizes:
            parts.append(numbers[begin : begin + size])
            begin += _align(size)
        return MixedNumbers(*parts)

    @property
    def num_numbers(self) -> int:
        return sum(map(_align, self._sizes))


def _align(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


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
        lengths = find_lengths(self.step.places, self.at)
        self.step.ends = ends_of(self.step, at, self.owners, num_kv_splits, lengths)
        return lengths

    @property
    def end_adapters(self) -> Any:
        """The adapters of the tokens that logits are wanted of."""
        return None if self.step.adapters is None else self.step.adapters[self.at.clamp(min=0)]


def find_lengths(places: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Lengths [M] of the sequences that end with the tokens at[M]; 0 for padding."""
    return (places[at.clamp(min=0)] + 1).int().masked_fill(at < 0, 0)


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
    given = shape.split(flat)
    rows, owners, places, at = given.rows.long(), given.owners.long(), given.positions.long(), given.at.long()
    if shape.is_padded:
        places = places.clamp(min=0)
    ids = torch.where(given.ids >= 0, given.ids.long(), tensors.last[rows[owners]].clamp(min=0))
    tables = [
        table[:, : used if has_slots else None][rows] for table, has_slots in zip(tensors.tables, tensors.has_slots)
    ]
    slots: list[torch.Tensor | None] = []
    for table, has_slots in zip(tables, tensors.has_slots):
        found = table[owners, places // block_size].long() * block_size + places % block_size if has_slots else None
        slots.append(found.masked_fill(given.positions < 0, -1) if found is not None and shape.is_padded else found)
    work = ops.Work(
        shape.num_single,
        given.tiles.view(-1, 2) if shape.num_tiles else None,
        num_kv_splits,
        single_lengths=given.single_lengths if shape.is_padded else None,
        num_tiles=given.num_tiles,
        longest=longest,
    )
    step = Step(ids, places, slots, tables, given.starts, given.lengths, work)
    step.adapters = tensors.find_adapters(rows[owners])
    return MixedInputs(step, at, owners[at.clamp(min=0) if shape.is_padded else at], given.at_rows, shape.is_padded)


class PackedRows:
    """Rows of a mixed step, packed one after the other, decode rows first."""

    def __init__(self, rows: Sequence[Row], devices: Sequence[RunningRow], tile_tokens: int, shift: int = 0) -> None:
        """Each position gets the token `shift` positions later."""
        self.rows, self.devices, self._shift = rows, devices, shift
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

    def find_firsts(self, order: Sequence[int], of_outputs: bool) -> list[int]:
        """Return the first token, or the first output, of each of a plan's rows, which were packed in this order. Where
        prompts are reported every token is an output."""
        all_computed = any(row.prompt_logprobs for row in self.rows)
        firsts, place = [0] * len(order), 0
        for index, row, end in zip(order, self.rows, self.ends):
            firsts[index] = end - row.count
            if of_outputs and row.output is Output.SAMPLE:
                firsts[index] = self.at[place] if all_computed else place
                place += 1 + len(row.draft)
        return firsts

    def fill(self, numbers: np.ndarray, shape: MixedShape, padding_row: int) -> None:
        """Write the numbers of a step of this shape, which has room for the rows."""
        to, count, num_tokens = shape.split(numbers), len(self.rows), self.num_tokens
        first = np.array([row.start for row in self.rows])
        counts, ends = np.array(self._counts), np.array(self.ends)
        self._fill_ids(to.ids)
        to.owners[:num_tokens] = np.repeat(np.arange(count), counts)
        to.positions[:num_tokens] = np.arange(num_tokens) + np.repeat(first - (ends - counts), counts)
        to.rows[:count] = [row.row for row in self.rows]
        to.lengths[:count] = first + counts
        to.starts[0], to.starts[1 : count + 1] = 0, ends
        num_at, num_tiles = len(self.at), len(self.tiles)
        to.at[:num_at], to.at_rows[:num_at] = self.at, self.at_rows
        to.num_tiles[0] = num_tiles
        if num_tiles:
            to.tiles[: 2 * num_tiles] = np.array(self.tiles, dtype=np.int32).reshape(-1)
        if shape.is_padded:
            self._fill_padding(to, padding_row)

    def _fill_padding(self, to: MixedNumbers, padding_row: int) -> None:
        count, num_tokens, num_single = len(self.rows), self.num_tokens, self.num_single
        num_at, num_tiles = len(self.at), len(self.tiles)
        to.ids[num_tokens:], to.positions[num_tokens:], to.owners[num_tokens:] = 0, -1, 0
        to.rows[count:], to.lengths[count:], to.starts[count + 1 :] = padding_row, 0, num_tokens
        to.single_lengths[:num_single], to.single_lengths[num_single:] = to.lengths[:num_single], 0
        to.at[num_at:], to.at_rows[num_at:] = -1, padding_row
        to.tiles[2 * num_tiles :: 2], to.tiles[2 * num_tiles + 1 :: 2] = count, 0  # a sequence without queries

    def _fill_ids(self, ids: np.ndarray) -> None:
        """Tokens at the rows' positions; -1 for one that only the device knows yet."""
        num, shift = self.num_single, self._shift
        ids[:num] = [
            known[row.start + shift] if row.start + shift < len(known := device.state.tokens) else -1
            for row, device in zip(self.rows[:num], self.devices)
        ]
        begin = num
        for row, device, end in zip(self.rows[num:], self.devices[num:], self.ends[num:]):
            ids[begin:end] = device.inputs(row, shift)
            begin = end


def require_lines(plan: Plan) -> None:
    """Refuse a plan that verifies a tree."""
    for row in plan.rows:
        if not is_line(row.draft):
            raise RuntimeError(
                f"row {row.row} of plan {plan.number} verifies a tree of {len(row.draft)} draft tokens, and a GPU "
                "verifies lines: plan one path of it"
            )


def is_single(row: Row) -> bool:
    """True if a decode step computes the row."""
    return row.count == 1 and row.output is Output.SAMPLE and not row.prompt_logprobs and not row.draft
