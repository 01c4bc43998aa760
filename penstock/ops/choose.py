"""What choosing a token asks of logits, without sorting them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.example import normal
from penstock.ops.registry import Example, op
from penstock.ops.rows import EachRow

PIECE = 1024  # values under one sum

_SHAPES = [(0, 8), (1, 49152), (3, 1), (5, 31), (7, 1000), (2, 1024), (4, 2500)]


def _logits() -> Iterator[Tensor]:
    """With many ties, with impossible tokens, with one value alone."""
    for seed, shape in enumerate(_SHAPES):
        yield normal(seed, *shape, scale=5.0)
        yield normal(seed, *shape, scale=3.0).round()
    masked = normal(9, 6, 2000).round()
    masked[:, 3:1990] = -torch.inf
    masked[4] = -torch.inf
    yield masked
    yield normal(11, 4, 96)[:, 16:80]


def _argmax_examples() -> Iterator[Example]:
    for x in _logits():
        yield {"x": x}
    damaged = normal(12, 5, 1500)
    damaged[0, 1400] = torch.nan
    damaged[1, 3:9] = torch.nan
    damaged[2, 1030] = torch.inf
    damaged[3, [0, 1499]] = torch.nan
    yield {"x": damaged}


def _above_examples() -> Iterator[Example]:
    for x in _logits():
        for room in (0, 5, 400):
            yield {"x": x, "least": torch.linspace(-1.0, 8.0, max(1, x.shape[0]))[: x.shape[0]], "room": room}


def _sum_examples() -> Iterator[Example]:
    for x in _logits():
        if x.shape[0] == 6:
            x[4] = 1.0
        top = x.max(dim=-1).values if x.shape[0] else x[:, 0]
        yield {"x": x, "top": top, "temperature": torch.linspace(0.3, 2.5, max(1, x.shape[0]))[: x.shape[0]]}


@op(tolerance={torch.float32: 0.0}, examples=_argmax_examples)
def argmax(x: Tensor) -> Tensor:
    """The first of the largest values of each row of x[S, V] → [S] int32; a NaN is larger than any number."""
    return torch.argmax(x, dim=-1).to(torch.int32)


@op(tolerance={torch.float32: 0.0}, examples=_above_examples, rows=EachRow("x", "least"))
def above(x: Tensor, least: Tensor, room: int) -> Tensor:
    """How many values of each row of x[S, V] are at least its least[S], then the places of the first `room` of them,
    ascending, -1 after the last → [S, 1 + room] int32."""
    out = torch.full((x.shape[0], 1 + room), -1, dtype=torch.int32)
    for row, values in enumerate(x >= least[:, None]):
        places = values.nonzero()[:, 0]
        out[row, 0] = len(places)
        out[row, 1 : 1 + len(places)] = places[:room]
    return out


@op(tolerance={torch.float32: 1e-5}, examples=_sum_examples, rows=EachRow("x", "top", "temperature"))
def weight_sums(x: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """Sums of exp((x - top[S]) / temperature[S]) over each 1,024 values of the rows of x[S, V]."""
    weights = torch.exp((x.float() - top[:, None]) / temperature[:, None])
    parts = [part.sum(dim=-1, dtype=torch.float64) for part in torch.split(weights, PIECE, dim=-1)]
    return torch.stack(parts, dim=-1).float()
