"""Low-rank additions on a GPU: every slot has room of its own, of fixed rank, so that captured steps find it there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.ops.matmul.linear import unpack_panels
from penstock.ops.matmul.lora import LowRank
from penstock.ops.registry import op

ALIGNMENT = 16  # values: of the addresses that kernels read from


@dataclass(frozen=True)
class AdapterRows:
    """The slot of each row's adapter [T] int32, -1 for none. `cached` is what kernels make of them, once a step."""

    slots: Tensor
    cached: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, at: Tensor) -> AdapterRows:
        return AdapterRows(self.slots[at])


class LoraRoom(NamedTuple):
    """The low-rank matrices of one linear and its P parts: a [P, R, C], b [O, R] and scales [P, R]; of an embedding a
    is [1, V, R]. Those of all slots have a first dimension more."""

    a: Tensor
    b: Tensor
    scales: Tensor


class LoraStacks:
    """The low-rank matrices of one linear in every slot, a [S, P · R, C], b [S, O, R] and scales [S, P · R], where the
    outputs of part p begin at bounds[p]; of an embedding a is [S, V, R]. A slot's are a stretch of one line of
    memory, which has those of all linears: see `LoraArea`."""

    a: Tensor
    b: Tensor
    scales: Tensor

    def __init__(self, rank: int, shape: tuple[int, int], sizes: Sequence[int], is_embedding: bool = False) -> None:
        """`shape` is the linear's, [O, C], of an embedding [C, V]; `sizes` are the outputs of its parts."""
        (self.num_out, self.num_in), self.rank, self.is_embedding = shape, rank, is_embedding
        self.bounds = tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))
        self.num_parts = len(sizes)
        self.first_value = self.first_scale = 0  # in a slot's line

    @property
    def num_scales(self) -> int:
        return self.num_parts * self.rank

    def cut(self, values: Tensor, scales: Tensor) -> LoraRoom:
        """Find this linear's room in a line of values and of scales, or in several lines."""
        lines, first = values.shape[:-1], self.first_value
        inner = (1, self.num_in, self.rank) if self.is_embedding else (self.num_parts, self.rank, self.num_in)
        end = first + prod(inner)
        a = values[..., first:end].view(*lines, *inner)
        b = values[..., round_up(end) :][..., : self.num_out * self.rank].view(*lines, self.num_out, self.rank)
        own = scales[..., self.first_scale :][..., : self.num_scales].view(*lines, self.num_parts, self.rank)
        return LoraRoom(a, b, own)

    def take_ranks(self, room: LoraRoom, first: int, count: int) -> LoraRoom:
        """Return the part of a slot's room that is for `count` ranks."""
        ranks = slice(first, first + count)
        a = room.a[:, :, ranks] if self.is_embedding else room.a[:, ranks]
        return LoraRoom(a, room.b[:, ranks], room.scales[:, ranks])

    def enter(self, room: LoraRoom, part: LowRank) -> None:
        """Enter matrices that span whole parts of the linear."""
        rows = part.a if self.is_embedding else unpack_panels(part.a, part.rank)
        end, ranks = part.first + part.num_out, self.take_ranks(room, 0, part.rank)
        ranks.b[part.first : end] = unpack_panels(part.b, part.num_out)
        for p, (first, last) in enumerate(pairwise(self.bounds)):
            if part.first <= first and last <= end:
                ranks.a[p] = rows
                ranks.scales[p] = part.scale


@dataclass(frozen=True)
class LoraImage:
    """An adapter as a slot's line has it, in memory that a GPU can read."""

    values: Tensor
    scales: Tensor
    rank: int  # the largest

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


class LoraArea:
    """A line of memory for each slot, with room for an adapter of every linear. Lines never move, and change between
    steps: two copies whatever the number of linears."""

    def __init__(
        self, stacks: Mapping[str, LoraStacks], num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.stacks, end, num_scales = stacks, 0, 0
        for one in stacks.values():
            one.first_value, one.first_scale = end, num_scales
            end += round_up(one.num_parts * one.rank * one.num_in) + round_up(one.num_out * one.rank)
            num_scales += round_up(one.num_scales)
        self.values = torch.zeros(num_slots, end, dtype=dtype, device=device)
        self.scales = torch.zeros(num_slots, num_scales, device=device)
        for one in stacks.values():
            room = one.cut(self.values, self.scales)
            one.a, one.b, one.scales = room.a.flatten(1, 2), room.b, room.scales.flatten(1)

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def _make_image(self, rank: int) -> LoraImage:
        pins = torch.cuda.is_available()
        values = torch.zeros(self.values.shape[1], dtype=self.values.dtype, pin_memory=pins)
        return LoraImage(values, torch.zeros(self.scales.shape[1], pin_memory=pins), rank)

    def lay_out(self, parts: Mapping[str, Sequence[LowRank]], rank: int) -> LoraImage:
        """Lay out an adapter's matrices, by their linears' names."""
        image = self._make_image(rank)
        for name, own in parts.items():
            for part in own if name in self.stacks else ():
                self.stacks[name].enter(self.stacks[name].cut(image.values, image.scales), part)
        return image

    def fill(self, slot: int, terms: Sequence[tuple[LoraImage, float]]) -> None:
        """Put the sum of adapters, each times a factor, into a slot. Copies are ordered with the stream's steps."""
        if not terms:
            return
        if len(terms) > 1:
            image = self._join(terms)
        else:
            ((first, factor),) = terms
            image = first if factor == 1.0 else replace(first, scales=_pin(first.scales * factor))
        self.values[slot].copy_(image.values, non_blocking=True)
        self.scales[slot].copy_(image.scales, non_blocking=True)

    def _join(self, terms: Sequence[tuple[LoraImage, float]]) -> LoraImage:
        """Put the ranks of several adapters side by side."""
        made = self._make_image(sum(image.rank for image, _ in terms))
        for one in self.stacks.values():
            if made.rank > one.rank:
                raise ValueError(f"{made.rank} ranks do not fit into a slot of {one.rank}")
            room, first = one.cut(made.values, made.scales), 0
            for image, factor in terms:
                theirs = one.take_ranks(one.cut(image.values, image.scales), 0, image.rank)
                own = one.take_ranks(room, first, image.rank)
                own.a.copy_(theirs.a)
                own.b.copy_(theirs.b)
                own.scales.copy_(theirs.scales * factor)
                first += image.rank
        return made


def round_up(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _pin(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


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
    scales = weights.scales[slot].view(-1, weights.rank)
    for p, (first, last) in enumerate(pairwise(weights.bounds)):
        delta = weights.b[slot, first:last].float() @ (inner[p] * scales[p])
        y[first:last] = (y[first:last].float() + delta).to(y.dtype)
