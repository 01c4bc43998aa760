"""Low-rank matrices as the kernels read them, each for its place in the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.models.cut import Cut
from penstock.models.lora.places import EMBEDDING, LoraPlace
from penstock.models.reading import ungroup
from penstock.ops import LowRank, Shift, Whole


@dataclass(frozen=True)
class Adapter:
    """The low-rank matrices of a model's linears, by our names of these, and what replaces something."""

    parts: dict[str, list[LowRank]]
    rank: int  # the largest
    replaced: dict[str, list[Shift | Whole]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for all in (self.parts, self.replaced) for parts in all.values() for part in parts)

    def add(self, linear: str, part: LowRank | Shift | Whole) -> None:
        if isinstance(part, LowRank):
            self.parts.setdefault(linear, []).append(part)
        else:
            self.replaced.setdefault(linear, []).append(part)

    def list_parts(self, linear: str) -> list[Any]:
        return [*self.parts.get(linear, ()), *self.replaced.get(linear, ())]


@dataclass(frozen=True)
class TrainedProduct:
    """scale · b · a of a module, a [r, in] and b [out, r]; of a stack a [E · r, in] and b [out, r · E]."""

    a: Tensor
    b: Tensor
    scale: float


def pack(place: LoraPlace, product: TrainedProduct, cut: Cut | None = None) -> Iterator[tuple[str, LowRank]]:
    """Lay out a module's products, by linears; with a `cut` what one rank has of them."""
    a, b, scale = product.a, product.b, product.scale
    if place.heads is not None:
        yield from _pack_heads(place, product)
    elif place.parameter:
        yield from _pack_stack(place, product)
    elif cut is None:
        b = b if place.group is None else ungroup(b, *place.group)
        is_embedding = place.linear == EMBEDDING
        yield place.linear, LowRank.pack(a, b, place.first, scale, is_embedding, place.matrix)
    else:
        b = b if place.group is None else ungroup(b, *place.group)
        yield from _pack_cut(place, TrainedProduct(a, b, scale), cut)


def _pack_cut(place: LoraPlace, product: TrainedProduct, cut: Cut) -> Iterator[tuple[str, LowRank]]:
    a, b, first = product.a, product.b, place.first
    if cut.columns is not None:
        a = a[:, cut.columns.start : cut.columns.stop].contiguous()
    if cut.rows is not None:
        first = sum(len(run) for run in cut.runs_within(0, place.first))
        runs = cut.runs_within(place.first, place.num_out)
        if not runs:
            return
        b = torch.cat([b[run.start : run.stop] for run in runs])
    yield place.linear, LowRank.pack(a, b, first, product.scale, is_embedding=place.linear == EMBEDDING)


def _pack_heads(place: LoraPlace, product: TrainedProduct) -> Iterator[tuple[str, LowRank]]:
    """Pack what is absorbed: keys' matrices stand transposed, between queries and latents."""
    assert place.heads is not None
    nope, value = place.heads
    for head, rows in enumerate(torch.split(product.b, nope + value)):
        key = LowRank.pack(rows[:nope].t(), product.a.t(), scale=product.scale, matrix=head)
        yield f"{place.linear}.key", key
        yield f"{place.linear}.value", LowRank.pack(product.a, rows[nope:], scale=product.scale, matrix=head)


def _pack_stack(place: LoraPlace, product: TrainedProduct) -> Iterator[tuple[str, LowRank]]:
    every = product.b.view(len(product.b), -1, place.stack)
    for matrix, a in enumerate(product.a.chunk(place.stack)):
        b = every[:, :, matrix]
        b = torch.cat([b[::2], b[1::2]]) if place.alternates else b.contiguous()
        yield place.linear, LowRank.pack(a.contiguous(), b, scale=product.scale, matrix=matrix)
