"""Views of the block pool that layers read and write. The first stride of each tensor spans a whole block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class KvCache:
    """Keys and values of one layer. `group` says which of a step's slots and block tables address them."""

    k: Tensor  # [N, K, D, P]; int4: two dimensions a byte
    v: Tensor  # [N, K, P, D]
    group: int
    k_scale: Tensor | None = None  # [N, K, P] float32 of an int8 cache, [N, K, G, 2, P] float16 of int4
    v_scale: Tensor | None = None


@dataclass
class LatentCache:
    """One vector per position, shared by all heads."""

    latent: Tensor  # [N, P, W]
    group: int


@dataclass
class StateRows:
    """Recurrent states: a layer owns rows `first_row` … `first_row + num_rows - 1` of each sequence's state."""

    rows: Tensor  # [N, rows per block, row size] float32
    group: int
    first_row: int
    num_rows: int

    def locate(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Find this layer's rows by the group's block table [S, B]: their blocks [S, R] and rows within them [R]."""
        index = torch.arange(self.first_row, self.first_row + self.num_rows, device=table.device)
        per_block = self.rows.shape[1]
        return table[:, index // per_block].long(), index % per_block

    def read(self, table: Tensor, is_new: Tensor) -> Tensor:
        """Copy the states of the sequences of `table` → [S, R, row size]; zeros for those that is_new[S] says."""
        return self.rows[self.locate(table)].masked_fill_(is_new[:, None, None], 0.0)

    def write(self, table: Tensor, states: Tensor) -> None:
        self.rows[self.locate(table)] = states


LayerMemory = KvCache | LatentCache | StateRows
