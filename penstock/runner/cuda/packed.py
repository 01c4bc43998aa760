"""Mixed steps: prefill chunks and decode rows, sent to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock import ops
from penstock.engine.plan import Output, Row
from penstock.ops.attention.inputs import NUM_COMMON
from penstock.ops.triton.tuning import MAX_PREFIXES
from penstock.runner.cuda.rows import RowTensors
from penstock.runner.cuda.staging import Staging
from penstock.runner.rows import RunningRow
from penstock.runner.step import Step

PER_TOKEN = 3 + 2 + 2  # ids, positions, sequences; logits wanted and their rows; tiles
PER_SEQUENCE = 3
ALIGNED = 4  # numbers of 4 bytes


def max_numbers(num_tokens: int, num_sequences: int, num_groups: int) -> int:
    """Bound the numbers that any step sends."""
    single = (NUM_COMMON + 2 * num_groups + 2 + 4) * num_sequences + 4 * MAX_PREFIXES
    return max(single, PER_TOKEN * num_tokens + PER_SEQUENCE * num_sequences + 9 * ALIGNED)


class PackedRows:
    """Rows of a mixed step, packed one after the other, decode rows first."""

    def __init__(self, rows: Sequence[Row], devices: Sequence[RunningRow], tile_tokens: int) -> None:
        self.rows, self.devices = rows, devices
        counts = [row.count for row in rows]
        self.ends = np.cumsum(counts).tolist()
        self.num_tokens = self.ends[-1]
        self.num_single = next((s for s, count in enumerate(counts) if count != 1), len(counts))
        self.at: list[int] = []  # tokens whose logits are wanted
        self.at_rows: list[int] = []  # whose rows they are
        for row, end in zip(rows, self.ends):
            if row.output is Output.SAMPLE:
                wanted = range(end - 1 - len(row.draft), end)
                self.at += wanted
                self.at_rows += [row.row] * len(wanted)
        self.tiles = [
            (s, first) for s in range(self.num_single, len(counts)) for first in range(0, counts[s], tile_tokens)
        ]
        self.tiles.sort(key=lambda tile: -rows[tile[0]].start - tile[1])  # what takes longest must not come last

    def send(
        self, staging: Staging, tensors: RowTensors, block_size: int, num_kv_splits: int
    ) -> tuple[Step, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the step, the tokens whose logits are wanted [M], their sequences and their rows [M]."""
        num_tokens, num_sequences, num_at, num_tiles = self.num_tokens, len(self.rows), len(self.at), len(self.tiles)
        numbers = staging.take()
        sizes = [num_tokens] * 3 + [num_sequences] * 2 + [num_sequences + 1, num_at, num_at, 2 * num_tiles]
        # Each part begins where kernels may read 16 bytes at once: they are compiled anew for any other place.
        begins = np.cumsum([0, *(-(-size // ALIGNED) * ALIGNED for size in sizes)]).tolist()
        parts = [numbers[begin : begin + size] for begin, size in zip(begins, sizes)]
        self._fill(*parts[:3])
        parts[3][:] = [row.row for row in self.rows]
        parts[4][:] = [row.start + row.count for row in self.rows]
        parts[5][:] = [0, *self.ends]
        parts[6][:], parts[7][:] = self.at, self.at_rows
        parts[8][:] = np.array(self.tiles, dtype=np.int32).reshape(-1)
        sent = staging.send(begins[-1])
        ids, positions, owners, rows, lengths, starts, at, at_rows, tiles = (
            sent[begin : begin + size] for begin, size in zip(begins, sizes)
        )
        rows, owners, places = rows.long(), owners.long(), positions.long()
        ids = torch.where(ids >= 0, ids.long(), tensors.last[rows[owners]].clamp(min=0))
        used = -(-max(row.start + row.count for row in self.rows) // block_size)
        widths = [used if has_slots else None for has_slots in tensors.has_slots]
        tables = [table[:, :width][rows] for table, width in zip(tensors.tables, widths)]
        slots = [
            table[owners, places // block_size].long() * block_size + places % block_size if has_slots else None
            for table, has_slots in zip(tables, tensors.has_slots)
        ]
        work = ops.Work(self.num_single, tiles.view(-1, 2), num_kv_splits)
        at = at.long()
        return Step(ids, places, slots, tables, starts, lengths, work), at, owners[at], at_rows

    def _fill(self, ids: np.ndarray, positions: np.ndarray, owners: np.ndarray) -> None:
        begin = 0
        for s, (row, device, end) in enumerate(zip(self.rows, self.devices, self.ends)):
            ids[begin:end] = device.inputs(row)
            positions[begin:end] = np.arange(row.start, row.start + row.count)
            owners[begin:end] = s
            begin = end
