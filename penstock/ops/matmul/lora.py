"""Low-rank additions to a linear's outputs (LoRA): each row names the slot of its adapters, or none."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.ops.matmul.linear import pack_panels, unpack_panels
from penstock.ops.registry import op

MAX_ADAPTERS = 8  # summed in one request
RECORD = 8  # 64-bit words of one low-rank matrix in a slot, as csrc/lora.cpp reads them; the last is the scale
SHIFT = 3  # words of a slot's shift
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
    matrix: int = 0  # of a stack

    @classmethod
    def pack(
        cls, a: Tensor, b: Tensor, first: int = 0, scale: float = 1.0, is_embedding: bool = False, matrix: int = 0
    ) -> LowRank:
        """Lay out a[R, C], or of an embedding a[R, V], and b[O, R] for the kernels."""
        rows = a.t().contiguous() if is_embedding else pack_panels(a)
        return cls(_detach(rows, a), _detach(pack_panels(b), b), a.shape[0], first, b.shape[0], scale, matrix)

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    @cached_property
    def record(self) -> np.ndarray:
        """The words of a record, all but the scale."""
        addresses = self.a.data_ptr(), self.b.data_ptr()
        words = (*addresses, STORED[self.a.dtype], STORED[self.b.dtype], self.rank, self.first, self.num_out)
        return np.array(words, dtype=np.int64)


@dataclass(frozen=True)
class Whole:
    """All outputs of a linear: weight [O, C] as panels, times the input; of an embedding rows of weight [V, O]."""

    weight: Tensor
    num_out: int
    width: int
    is_embedding: bool = False
    first: ClassVar[int] = 0
    scale: ClassVar[float] = 1.0
    matrix: ClassVar[int] = 0

    @classmethod
    def pack(cls, weight: Tensor, is_embedding: bool = False) -> Whole:
        """Lay out weight[O, C], or of an embedding [V, O]."""
        if is_embedding:
            return cls(weight.clone(), weight.shape[1], weight.shape[0], is_embedding=True)
        return cls(_detach(pack_panels(weight), weight), weight.shape[0], weight.shape[1])

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    @cached_property
    def record(self) -> np.ndarray:
        """A record with one matrix: a of an embedding, b otherwise."""
        at, kind = self.weight.data_ptr(), STORED[self.weight.dtype]
        words = (at, 0, kind, 0, self.num_out) if self.is_embedding else (0, at, 0, kind, self.width)
        return np.array((*words, 0, self.num_out), dtype=np.int64)


@dataclass(frozen=True)
class Shift:
    """y += gain · (y without its residual) + offset for some outputs of a linear, before anything is added to it."""

    first: int
    gain: Tensor  # [O] float32
    offset: Tensor  # [O] float32
    matrix: int = 0  # of a stack

    @property
    def num_bytes(self) -> int:
        return self.gain.nbytes + self.offset.nbytes


def _detach(packed: Tensor, tensor: Tensor) -> Tensor:
    """Copy what still lies where it was given, as rank 1 may: a file that is cut or changed must not reach kernels."""
    is_shared = packed.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return packed.clone() if is_shared else packed


class Term(NamedTuple):
    """One adapter of a slot: what it has for a linear, and a factor. Low-rank matrices share no outputs."""

    parts: Sequence[Any]  # `LowRank`, `Whole` or `Shift`; on a GPU `PinnedLowRank`
    scale: float


class LoraWeights:
    """The parts of adapters for one linear, by slot; of a stack, for each of its matrices. Slots change between steps;
    `records` and `shifts` stay in place."""

    def __init__(self, num_out: int, num_slots: int, max_parts: int = 1, num_matrices: int = 1) -> None:
        self.num_out, self.max_parts, self.num_matrices = num_out, max_parts, num_matrices
        self.terms: list[tuple[Term, ...]] = [()] * num_slots
        count = num_slots * num_matrices
        self._words = np.zeros((count, MAX_ADAPTERS, max_parts, RECORD), np.int64)  # in memory once it is written
        self.records = torch.from_numpy(self._words)
        self.shifts = torch.zeros(count, SHIFT, dtype=torch.int64)
        self.moved: dict[int, tuple[Tensor, Tensor]] = {}  # gains and offsets [num_out] of matrices in slots

    def fill(self, slot: int, terms: Sequence[Term]) -> None:
        """Put adapters into a slot, in the order in which they are summed; none clear it."""
        if not terms and not self.terms[slot]:
            return
        self.terms[slot] = tuple(terms)
        own = range(slot * self.num_matrices, (slot + 1) * self.num_matrices)
        self._words[own.start : own.stop] = 0
        self.shifts[own.start : own.stop] = 0
        for at in own:
            self.moved.pop(at, None)
        used = np.zeros((self.num_matrices, len(terms)), np.int64)
        for i, term in enumerate(terms):
            for part in term.parts:
                at = own.start + part.matrix
                if isinstance(part, Shift):
                    self._move(at, part, term.scale)
                    continue
                record = self._words[at, i, used[part.matrix, i]]
                used[part.matrix, i] += 1
                record[: RECORD - 1] = part.record
                record[RECORD - 1] = struct.unpack("<i", struct.pack("<f", term.scale * part.scale))[0]
        self.shifts[own.start : own.stop, 0] = len(terms)

    def _move(self, at: int, part: Shift, scale: float) -> None:
        gain, offset = self.moved.setdefault(at, (torch.zeros(self.num_out), torch.zeros(self.num_out)))
        rows = slice(part.first, part.first + len(part.gain))
        gain[rows] += scale * part.gain
        offset[rows] += scale * part.offset
        self.shifts[at, 1:] = torch.tensor([gain.data_ptr(), offset.data_ptr()])

    def apply(self, x: Tensor, y: Tensor, at: int, residual: Tensor | None, is_embedding: bool = False) -> None:
        """Do to a row y[O] what a slot's matrix does, for x[C], or for a row's number in the embedding."""
        slot, matrix = divmod(at, self.num_matrices)
        if at in self.moved:
            gain, offset = self.moved[at]
            y += gain * (y if residual is None else y - residual) + offset
        for parts, scale in self.terms[slot]:
            for part in parts:
                if not isinstance(part, Shift) and part.matrix == matrix:
                    y[part.first : part.first + part.num_out] += scale * part.scale * _multiply(x, part, is_embedding)


def _multiply(x: Tensor, part: LowRank | Whole, is_embedding: bool) -> Tensor:
    if isinstance(part, Whole):
        return part.weight[int(x)].float() if is_embedding else unpack_panels(part.weight, part.num_out).float() @ x
    inner = part.a[int(x)].float() if is_embedding else unpack_panels(part.a, part.rank).float() @ x.float()
    return unpack_panels(part.b, part.num_out).float() @ inner


@op(tolerance={torch.float32: 2e-5})
def add_lora(x: Tensor, y: Tensor, slots: Tensor, weights: LoraWeights, residual: Tensor | None = None) -> Tensor:
    """Add scale · b · (a · x) of the adapters in slots[T] to the rows of y[T, O], which are overwritten, for x[T, C].
    y has the `residual`[T, O] in it already, if there is one. Rows whose slot is -1 keep their bits."""
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            weights.apply(x[row], y[row], slot, None if residual is None else residual[row])
    return y


@op(tolerance={torch.float32: 2e-5})
def add_lora_rows(ids: Tensor, y: Tensor, slots: Tensor, weights: LoraWeights) -> Tensor:
    """As `add_lora` for an embedding's rows: a · x is the column ids[T] of a."""
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            weights.apply(ids[row], y[row], slot, None, is_embedding=True)
    return y


@op(tolerance={torch.float32: 2e-5})
def add_grouped_lora(x: Tensor, y: Tensor, slots: Tensor, weights: LoraWeights, ids: Tensor | None = None) -> Tensor:
    """As `add_lora` for y[T, K, O] = x[T, C] or x[T, K, C] times the matrices ids[T, K] of a stack, or 0 to K - 1."""
    for row, slot in enumerate(slots.tolist()):
        for k in range(y.shape[1]):
            matrix = k if ids is None else int(ids[row, k])
            if slot >= 0 and matrix >= 0:
                own = x[row] if x.dim() == 2 else x[row, k]
                weights.apply(own, y[row, k], slot * weights.num_matrices + matrix, None)
    return y
