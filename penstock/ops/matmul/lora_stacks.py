"""Low-rank additions on a GPU: every slot has room of its own for one adapter, so that captured steps find it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from penstock.ops.matmul.linear import unpack_panels
from penstock.ops.matmul.lora import LowRank, Term
from penstock.ops.registry import op


@dataclass(frozen=True)
class AdapterRows:
    """The slot of each row's adapter [T] int32, -1 for none. `cached` is what kernels make of them, once a step."""

    slots: Tensor
    cached: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, at: Tensor) -> AdapterRows:
        return AdapterRows(self.slots[at])


@dataclass(frozen=True)
class PinnedLowRank:
    """scale · b · a as rows, a [R, C] and b [O, R], of an embedding a [V, R], from where they are copied to a GPU."""

    a: Tensor
    b: Tensor
    first: int  # output of the linear that row 0 of b belongs to
    scale: float

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    @classmethod
    def unpack(cls, part: LowRank, dtype: torch.dtype, is_embedding: bool) -> PinnedLowRank:
        """Turn panels into rows in `dtype`, in memory that a GPU can read."""
        a = part.a if is_embedding else unpack_panels(part.a, part.rank)
        rows = [each.to(dtype).contiguous() for each in (a, unpack_panels(part.b, part.num_out))]
        if torch.cuda.is_available():
            rows = [each.pin_memory() for each in rows]
        return cls(rows[0], rows[1], part.first, part.scale)


class LoraStacks:
    """The low-rank matrices of one linear: a [S, P · R, C] and b [S, O, R] for S slots and the P parts of the linear,
    whose outputs begin at `bounds`; of an embedding a [S, V, R]. Slots change between steps and never move."""

    def __init__(
        self,
        num_slots: int,
        rank: int,
        shape: tuple[int, int],
        sizes: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        is_embedding: bool = False,
    ) -> None:
        """`shape` is the linear's, [O, C], of an embedding [C, V]; `sizes` are the outputs of its parts."""
        (self.num_out, num_in), self.rank, self.is_embedding = shape, rank, is_embedding
        self.bounds = tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))
        inner = (num_in, rank) if is_embedding else (len(sizes) * rank, num_in)
        self.a = torch.zeros(num_slots, *inner, dtype=dtype, device=device)
        self.b = torch.zeros(num_slots, self.num_out, rank, dtype=dtype, device=device)
        self.scales = torch.zeros(num_slots, len(sizes), device=device)
        self._filled: set[int] = set()

    def fill(self, slot: int, terms: Sequence[Term]) -> None:
        """Put an adapter into a slot; none clears it. Copies are ordered with the steps of the stream."""
        if slot in self._filled:
            for tensor in (self.a, self.b, self.scales):
                tensor[slot].zero_()
            self._filled.discard(slot)
        for parts, scale in terms:
            for part in parts:
                self._enter(slot, part, scale)
                self._filled.add(slot)

    def _enter(self, slot: int, part: Any, scale: float) -> None:
        """Enter matrices that span whole parts of the linear."""
        num_ranks, end = part.b.shape[1], part.first + part.b.shape[0]
        rows = self.b[slot, part.first : end, :num_ranks]
        rows.copy_(part.b, non_blocking=True)
        for p, (first, last) in enumerate(pairwise(self.bounds)):
            if part.first <= first and last <= end:
                own = self.a[slot, :, :num_ranks] if self.is_embedding else self.a[slot, p * self.rank :][:num_ranks]
                own.copy_(part.a, non_blocking=True)
                self.scales[slot, p] = part.scale * scale


@op(tolerance={torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3})
def add_lora_stacks(x: Tensor, y: Tensor, rows: AdapterRows, weights: LoraStacks) -> Tensor:
    """Add scale · b · (a · x) of each row's adapter to y[T, O], which is overwritten, for x[T, C]. Rows without one
    keep their bits."""
    for row, slot in enumerate(rows.slots.tolist()):
        if slot >= 0:
            inner = weights.a[slot].float() @ x[row].float()
            _expand(y[row], inner.view(-1, weights.rank), slot, weights)
    return y


@op(tolerance={torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3})
def add_lora_columns(ids: Tensor, y: Tensor, rows: AdapterRows, weights: LoraStacks) -> Tensor:
    """As `add_lora_stacks` for an embedding's rows: a · x is row ids[T] of a."""
    for row, (token, slot) in enumerate(zip(ids.tolist(), rows.slots.tolist(), strict=True)):
        if slot >= 0:
            _expand(y[row], weights.a[slot, token].float().view(1, -1), slot, weights)
    return y


def _expand(y: Tensor, inner: Tensor, slot: int, weights: LoraStacks) -> None:
    for p, (first, last) in enumerate(pairwise(weights.bounds)):
        delta = weights.b[slot, first:last].float() @ inner[p] * weights.scales[slot, p]
        y[first:last] = (y[first:last].float() + delta).to(y.dtype)
