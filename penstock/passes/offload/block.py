"""A block some of whose weights lie in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock import layers
from penstock.ops.triton.launch import launch_in_turn
from penstock.passes.offload.stream import Route, WeightStream
from penstock.quant.scheme import StoredWeight


@dataclass
class Stay:
    """A tensor of a weight that lies in host memory."""

    scheme: StoredWeight
    name: str
    host: Tensor
    mapped: Tensor | None  # the same as the device's, for a stack of matrices


class OffloadedBlock:
    """Called like the block. Its weights pass through the stream's buffers; of stacks, a step of few rows reads the
    matrices it needs in place.

    Buffers change during a step, so a block's kernels start in turn: one that reads weights before its predecessor has
    ended could see those of an earlier layer."""

    def __init__(self, block: layers.AnyBlock, stays: Iterable[Stay], stream: WeightStream) -> None:
        self.mixer, self.ffn, self.block = block.mixer, block.ffn, block
        self.stays, self.stream = list(stays), stream
        self._few = self._join(stream.few, [stay for stay in self.stays if stay.mapped is None])
        self._many = self._join(stream.many, self.stays)

    @staticmethod
    def _join(route: Route, stays: list[Stay]) -> tuple[int | None, list[Stay]]:
        return (route.add([stay.host for stay in stays]) if stays else None), stays

    def __call__(self, x: Tensor, step: layers.StepInputs, memory: Any) -> Tensor:
        is_few = len(x) <= self.stream.max_few_rows
        route, (number, _) = (self.stream.few, self._few) if is_few else (self.stream.many, self._many)
        if self.stream.max_few_rows:  # other steps' weights lie elsewhere
            self.place(is_few)
        copier = self.stream.copier
        if number is not None:
            route.enter(number, copier)
        with nullcontext() if number is None else launch_in_turn():
            y = self.block(x, step, memory)
        if number is not None:
            route.leave(number, copier)
        return y

    def place(self, is_few: bool) -> None:
        """Let the weights' tensors be those that a step of few rows reads, or of many."""
        if is_few:
            for stay in self.stays:
                if stay.mapped is not None:
                    setattr(stay.scheme, stay.name, stay.mapped)
        route, (number, stays) = (self.stream.few, self._few) if is_few else (self.stream.many, self._many)
        if number is not None:
            for stay, place in zip(stays, route.copies[number].places, strict=True):
                setattr(stay.scheme, stay.name, place)

    @property
    def row_limits(self) -> set[int]:
        """As the block's; and other kernels run where few rows end."""
        own: set[int] = set(getattr(self.block, "row_limits", ()))
        return own | ({self.stream.max_few_rows} if self.stream.max_few_rows else set())

    @property
    def kernels(self) -> tuple[bool, bool]:
        """Blocks of one description and equal in this launch the same kernels."""
        return self._few[0] is None, self._many[0] is None
