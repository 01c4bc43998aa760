"""Low-rank additions to a linear's outputs (LoRA): each row names the slot of its adapters, or none."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.ops.matmul.linear import pack_panels, unpack_panels
from penstock.ops.registry import op

MAX_ADAPTERS = 8  # summed in one request
RECORD = 8  # 64-bit words of one low-rank matrix in a slot, as csrc/lora.cpp reads them; the last is the scale
STORED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in number.h


@dataclass(frozen=True)
class LowRank:
    """scale · b · a for some outputs of a linear: a [R, C] and b [O, R] as panels. Of an embedding `a` is [V, R]."""

    a: Tensor
    b: Tensor
    rank: int
    first: int  # output of the linear that row 0 of b belongs to
    num_out: int
    scale: float = 1.0

    @classmethod
    def pack(cls, a: Tensor, b: Tensor, first: int = 0, scale: float = 1.0, is_embedding: bool = False) -> LowRank:
        """Lay out a[R, C], or of an embedding a[R, V], and b[O, R] for the kernels."""
        rows = a.t().contiguous() if is_embedding else pack_panels(a)
        return cls(_detach(rows, a), _detach(pack_panels(b), b), a.shape[0], first, b.shape[0], scale)

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    @cached_property
    def record(self) -> np.ndarray:
        """The words of a record, all but the scale."""
        addresses = self.a.data_ptr(), self.b.data_ptr()
        words = (*addresses, STORED[self.a.dtype], STORED[self.b.dtype], self.rank, self.first, self.num_out)
        return np.array(words, dtype=np.int64)


def _detach(packed: Tensor, given: Tensor) -> Tensor:
    """Copy what still lies where it was given, as rank 1 may: a file that is cut or changed must not reach kernels."""
    is_shared = packed.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    return packed.clone() if is_shared else packed


class Term(NamedTuple):
    """One adapter of a slot: its low-rank matrices of a linear, which share no outputs, and a factor."""

    parts: Sequence[Any]  # `LowRank`; on a GPU `PinnedLowRank`
    scale: float


class LoraWeights:
    """The low-rank matrices of one linear, by slot. Slots change between steps; `records` stays in place."""

    def __init__(self, num_out: int, num_slots: int, max_parts: int = 1) -> None:
        self.num_out, self.max_parts = num_out, max_parts
        self.terms: list[tuple[Term, ...]] = [()] * num_slots
        self.records = torch.zeros(num_slots, MAX_ADAPTERS, max_parts, RECORD, dtype=torch.int64)
        self._words = self.records.numpy()

    def fill(self, slot: int, terms: Sequence[Term]) -> None:
        """Put adapters into a slot, in the order in which they are summed; none clear it."""
        if not terms and not self.terms[slot]:
            return
        self.terms[slot] = tuple(terms)
        records = self._words[slot]
        records[...] = 0
        for i, term in enumerate(terms):
            for j, part in enumerate(term.parts):
                records[i, j, : RECORD - 1] = part.record
                records[i, j, RECORD - 1] = struct.unpack("<i", struct.pack("<f", term.scale * part.scale))[0]


@op(tolerance={torch.float32: 2e-5})
def add_lora(x: Tensor, y: Tensor, slots: Tensor, weights: LoraWeights) -> Tensor:
    """Add scale · b · (a · x) of the adapters in slots[T] to the rows of y[T, O], which are overwritten, for x[T, C].
    Rows whose slot is -1 keep their bits."""
    for row, slot in enumerate(slots.tolist()):
        for parts, scale in weights.terms[slot] if slot >= 0 else ():
            for part in parts:
                a = unpack_panels(part.a, part.rank).float()
                _expand(y[row], a @ x[row].float(), part, scale)
    return y


@op(tolerance={torch.float32: 2e-5})
def add_lora_rows(ids: Tensor, y: Tensor, slots: Tensor, weights: LoraWeights) -> Tensor:
    """As `add_lora` for an embedding's rows: a · x is the column ids[T] of a."""
    for row, (token, slot) in enumerate(zip(ids.tolist(), slots.tolist(), strict=True)):
        for parts, scale in weights.terms[slot] if slot >= 0 else ():
            for part in parts:
                _expand(y[row], part.a[token].float(), part, scale)
    return y


def _expand(y: Tensor, inner: Tensor, part: LowRank, scale: float) -> None:
    b = unpack_panels(part.b, part.num_out).float()
    y[part.first : part.first + part.num_out] += scale * part.scale * (b @ inner)
