"""Memory for what a step computes on its way: places that are given again once nobody holds their tensor."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64
SLAB_BYTES = 1 << 22


class Arena:
    """Slabs that stay where they are. Every layout starts from all of them, so layouts share their memory."""

    def __init__(self) -> None:
        self.slabs: list[np.ndarray] = []

    @property
    def num_bytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)

    def add_slab(self, size: int) -> np.ndarray:
        size = -(-max(size, SLAB_BYTES) // ALIGNMENT) * ALIGNMENT
        whole = np.empty(size + ALIGNMENT, dtype=np.uint8)
        begin = -whole.ctypes.data % ALIGNMENT
        slab = whole[begin : begin + size]
        self.slabs.append(slab)
        return slab


class Layout:
    """Hands out an arena's memory during one recording; tensors that are alive at the same time never overlap."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._free = [[(0, slab.nbytes)] for slab in arena.slabs]  # per slab: gaps (begin, end), ascending, apart

    def tensor(self, like: Tensor) -> Tensor:
        """A tensor of that shape, layout and dtype. Its place is free again when its storage is given up."""
        size = -(-like.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
        number, begin = self._take(size)
        place = self._arena.slabs[number][begin : begin + size]
        weakref.finalize(place, self._give_back, number, begin, begin + size).atexit = False
        whole = torch.from_numpy(place).view(like.dtype)  # the storage owns `place`
        return whole.as_strided(like.shape, like.stride())

    def _take(self, size: int) -> tuple[int, int]:
        for number, gaps in enumerate(self._free):
            for i, (begin, end) in enumerate(gaps):
                if end - begin >= size:
                    gaps[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                    return number, begin
        slab = self._arena.add_slab(size)
        self._free.append([(size, slab.nbytes)] if slab.nbytes > size else [])
        return len(self._free) - 1, 0

    def _give_back(self, number: int, begin: int, end: int) -> None:
        merged: list[tuple[int, int]] = []
        for gap in sorted([*self._free[number], (begin, end)]):
            if merged and merged[-1][1] == gap[0]:
                merged[-1] = (merged[-1][0], gap[1])
            else:
                merged.append(gap)
        self._free[number] = merged
