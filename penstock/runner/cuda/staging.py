"""Copies to the device from pinned memory."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import numpy as np
import torch

NUM_BUFFERS = 4  # more than the steps that can be under way


def to_device(values: Sequence[object] | np.ndarray, device: torch.device) -> torch.Tensor:
    """Start copying a few numbers, or rows of them."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True)


def record_event() -> torch.cuda.Event:
    """Record a timed event on the current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def free_gpu_memory() -> None:
    """Give what a closed runner held back to other processes."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        torch.cuda.empty_cache()


class Staging:
    """Pinned buffers used in turn; one is written again only when its last copy has arrived."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = device
        self._pinned = [torch.empty(size, dtype=torch.int32).pin_memory() for _ in range(NUM_BUFFERS)]
        self._numbers = [pinned.numpy() for pinned in self._pinned]
        self._arrived: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        self._next = 0

    def take(self) -> np.ndarray:
        """A buffer to write into; `send` sends it."""
        self._next = (self._next + 1) % NUM_BUFFERS
        arrived = self._arrived[self._next]
        if arrived is not None:
            arrived.synchronize()
        return self._numbers[self._next]

    def send(self, count: int, target: torch.Tensor | None = None) -> torch.Tensor:
        """The first `count` numbers of the buffer last taken, on the device."""
        source = self._pinned[self._next][:count]
        sent = source.to(self.device, non_blocking=True) if target is None else target.copy_(source, non_blocking=True)
        event = self._arrived[self._next] or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._arrived[self._next] = event
        return sent
