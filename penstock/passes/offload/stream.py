"""The way of offloaded weights through two buffers on the device, each layer's while another one computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NUM_BUFFERS = 2
ALIGNMENT = 256  # bytes, of a tensor in a buffer


def aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


@dataclass
class LayerCopy:
    """One layer's copies: pinned tensors, and their places in one of the buffers."""

    hosts: Sequence[Tensor]
    places: list[Tensor] = field(default_factory=list)
    arrived: Any = None  # an event

    @property
    def num_bytes(self) -> int:
        return sum(aligned_bytes(host) for host in self.hosts)

    def copy(self) -> None:
        for host, place in zip(self.hosts, self.places, strict=True):
            place.copy_(host, non_blocking=True)


class Copier:
    """Copies at once, where there is no GPU."""

    def wait_for_steps(self) -> None:
        """Let later copies begin only when what has been launched so far is done."""

    def start(self, each: LayerCopy) -> None:
        each.copy()

    def wait_for(self, each: LayerCopy) -> None:
        """Let what is launched later begin only when the copies are there."""


class StreamCopier(Copier):
    """Copies on a stream of their own, beside the kernels. All waiting is by events between the two streams, so that a
    captured step has copies and waits as nodes and edges of its graph. A step ends with no copy under way."""

    def __init__(self) -> None:
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def wait_for_steps(self) -> None:
        self._stream.wait_event(torch.cuda.current_stream().record_event())

    def start(self, each: LayerCopy) -> None:
        with torch.cuda.stream(self._stream):
            each.copy()
        each.arrived = self._stream.record_event()

    def wait_for(self, each: LayerCopy) -> None:
        torch.cuda.current_stream().wait_event(each.arrived)


class Route:
    """The copies of a step, in the order of their layers. One begins once the layer that had its buffer is done."""

    def __init__(self) -> None:
        self.copies: list[LayerCopy] = []

    def add(self, hosts: Sequence[Tensor]) -> int:
        self.copies.append(LayerCopy(hosts))
        return len(self.copies) - 1

    def enter(self, number: int, copier: Copier) -> None:
        """Begin a layer: its weights are there for what is launched from here on."""
        if number == 0:
            copier.wait_for_steps()
            for each in self.copies[:NUM_BUFFERS]:
                copier.start(each)
        copier.wait_for(self.copies[number])

    def leave(self, number: int, copier: Copier) -> None:
        """End a layer: its buffer is free for the one after the next."""
        later = self.copies[number + NUM_BUFFERS :][:1]
        if later:
            copier.wait_for_steps()
            copier.start(later[0])

    def place(self, buffers: Sequence[Tensor]) -> None:
        for number, each in enumerate(self.copies):
            buffer, first = buffers[number % NUM_BUFFERS], 0
            for host in each.hosts:
                part = buffer[first : first + host.nbytes]
                each.places.append(part.view(host.dtype).view(host.shape))
                first += aligned_bytes(host)


class WeightStream:
    """Two buffers that all offloaded weights share, and the routes through them: of steps of few rows, that read
    experts in place, and of others. Once allocated, nothing moves: captured steps hold the addresses."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.few, self.many = device, Route(), Route()
        self.buffers: list[Tensor] = []
        self.copier = Copier()
        self.max_few_rows = 0  # of a step; the same for all layers, since a step takes one route

    def limit_few_rows(self, num_rows: int) -> None:
        """Let steps of more rows copy stacks whole."""
        self.max_few_rows = min(self.max_few_rows or num_rows, num_rows)

    def allocate(self) -> None:
        """Make the buffers, after the last layer has been added."""
        size = max((each.num_bytes for each in self.many.copies), default=0)
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(NUM_BUFFERS)]
        for route in (self.few, self.many):
            route.place(self.buffers)
        if self.device.type == "cuda":
            self.copier = StreamCopier()
