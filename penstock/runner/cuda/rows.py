"""What the device knows of each row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.engine.plan import Admission, Plan
from penstock.runner.cuda.staging import sent
from penstock.runner.cuda.wishes import WishRows
from penstock.runner.rows import entries
from penstock.sampling.random import WORD, philox
from penstock.sampling.row import RowState

HOTTEST = 1e38  # a temperature that float32 holds


class RowTensors:
    """Of `num_rows` rows and one more that is nobody's: last token, temperature, random key, what else is wished of its
    sampling, blocks in each group."""

    def __init__(
        self, num_rows: int, num_groups: int, table_width: int, vocab_size: int, max_tokens: int, device: torch.device
    ) -> None:
        self.nobody = num_rows
        self.last = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(num_rows + 1, device=device)
        self.keys = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.tables = [
            torch.zeros((num_rows + 1, table_width), dtype=torch.int32, device=device) for _ in range(num_groups)
        ]
        self.wishes = WishRows(num_rows, vocab_size, max_tokens, device)
        self._device = device

    def admit(self, admissions: Sequence[Admission], states: Sequence[RowState]) -> None:
        if not admissions:
            return
        self.wishes.admit([(admission.row, state) for admission, state in zip(admissions, states)])
        rows = self._sent([admission.row for admission in admissions])
        samplings = [admission.request.sampling for admission in admissions]
        self.temperature[rows] = self._sent(
            [0.0 if sampling.greedy else min(float(sampling.temperature), HOTTEST) for sampling in samplings]
        )
        self.keys[rows] = self._sent([row_key(admission.request.seed, admission.sibling) for admission in admissions])

    def enter(self, plan: Plan) -> None:
        """All new blocks of a plan's rows."""
        for g, table in enumerate(self.tables):
            changed = [row for row in plan.rows if row.blocks and row.blocks[g]]
            if changed:
                rows = np.repeat([row.row for row in changed], [len(row.blocks[g]) for row in changed])
                where, indices, blocks = sent(
                    np.vstack((rows, entries([row.blocks[g] for row in changed]))), self._device
                )
                table[where, indices] = blocks.to(torch.int32)

    def take(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Tokens that the host chose."""
        if rows:
            self.last[self._sent(list(rows))] = self._sent(list(tokens))

    def _sent(self, values: list[int] | list[float]) -> torch.Tensor:
        return sent(values, self._device)


def row_key(seed: int, sibling: int) -> int:
    """64 bits, as a signed number, for a request's seed and one of its siblings."""
    high, low, _, _ = philox((sibling & WORD, 0, 0, 0), (seed & WORD, seed >> 32 & WORD))
    key = high << 32 | low
    return key - (1 << 64) if key >> 63 else key
