"""Weights whose columns lie in another order than the inputs: a scheme around a scheme that gathers the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from penstock.ops import OpTable
from penstock.quant.coded import Coded
from penstock.quant.packed import Stored
from penstock.quant.scheme import Scheme


class Permuted:
    """A scheme that meets the inputs order[C] of x."""

    def __init__(self, ops: OpTable, scheme: Scheme, order: Tensor) -> None:
        self.ops, self.scheme, self.order = ops, scheme, order
        self.num_out, self.num_in = scheme.num_out, scheme.num_in

    @property
    def num_bytes(self) -> int:
        return self.scheme.num_bytes + self.order.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        return self.scheme.matmul(self.ops.take_columns(x, self.order))

    def rows(self, ids: Tensor) -> Tensor:
        return self.ops.take_columns(self.scheme.rows(ids), torch.argsort(self.order))


class Stacked:
    """Several schemes, one after the other: what is computed together but meets its inputs in unlike orders."""

    def __init__(self, schemes: Sequence[Scheme]) -> None:
        self.schemes = list(schemes)
        self.num_out, self.num_in = sum(scheme.num_out for scheme in schemes), schemes[0].num_in

    @property
    def num_bytes(self) -> int:
        return sum(scheme.num_bytes for scheme in self.schemes)

    def matmul(self, x: Tensor) -> Tensor:
        return torch.cat([scheme.matmul(x) for scheme in self.schemes], dim=1)

    def rows(self, ids: Tensor) -> Tensor:
        every = [scheme.rows(torch.arange(scheme.num_out, device=ids.device)) for scheme in self.schemes]
        return torch.cat(every)[ids]


Pack = Callable[[Sequence[Stored], Tensor | None], Scheme | None]


def pack_in_order(
    ops: OpTable, stored: Sequence[Stored], bias: Tensor | None, pack: Pack, device: torch.device | str = "cpu"
) -> Scheme | None:
    """Pack stored matrices, one after the other, each with its inputs in its own order; None if one is not packed."""
    schemes: list[Scheme] = []
    first = 0
    for _, group in groupby(stored, key=_name_order):
        run = list(group)
        count = sum(part.num_out for part in run)
        packed = pack(run, None if bias is None else bias[first : first + count])
        if packed is None:
            return None
        order = run[0].order if isinstance(run[0], Coded) else None
        schemes.append(packed if order is None else Permuted(ops, packed, order.to(device)))
        first += count
    return schemes[0] if len(schemes) == 1 else Stacked(schemes)


def _name_order(part: Stored) -> bytes:
    return part.order.numpy().tobytes() if isinstance(part, Coded) and part.order is not None else b""
