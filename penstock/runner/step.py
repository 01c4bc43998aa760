"""A step on the device: the tensors a model's forward pass reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.layers import Ends
from penstock.ops import Work


@dataclass
class Step:
    """T tokens of S sequences, packed one after the other; one slot list and one block table per cache group."""

    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: list[torch.Tensor]  # per group [T] int64: block * P + offset, where this token's state goes
    tables: list[torch.Tensor]  # per group [S, B] int32: position // P -> block; -1 before a window
    query_start: torch.Tensor  # [S + 1] int32
    lengths: torch.Tensor  # [S] int32: positions up to and including this step's
    work: Work | None = None  # how attention is dealt out, where a device wants to know

    def cut(self, num_tokens: int, num_sequences: int) -> Step:
        """The first so many of each, where they lie."""
        return Step(
            self.ids[:num_tokens],
            self.positions[:num_tokens],
            [slots[:num_tokens] for slots in self.slots],
            [table[:num_sequences] for table in self.tables],
            self.query_start[: num_sequences + 1],
            self.lengths[:num_sequences],
        )


def ends_of(step: Step, at: torch.Tensor, owners: torch.Tensor, num_parts: int = 1) -> Ends:
    """For the tokens at[M] of a step, which belong to its sequences owners[M]."""
    count = len(at)
    positions = step.positions[at]
    alone = Step(
        step.ids[at],
        positions,
        [slots[at] for slots in step.slots],
        [table[owners] for table in step.tables],
        torch.arange(count + 1, dtype=torch.int32, device=at.device),
        (positions + 1).int(),
        None if step.work is None else Work(count, None, num_parts),
    )
    return Ends(at, alone)


@dataclass
class LayerCache:
    """One layer's part of the block pool. Views: the first stride spans a whole block."""

    k: torch.Tensor  # [N, K, D, P]
    v: torch.Tensor  # [N, K, P, D]
    group: int
    k_scale: torch.Tensor | None = None  # [N, K, P] float32 of an int8 cache
    v_scale: torch.Tensor | None = None
