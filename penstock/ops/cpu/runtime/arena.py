"""Memory for the intermediate tensors of a taped step; memory is reused once its tensor is freed."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64
SLAB_BYTES = 1 << 22


class Arena:
    """Slabs of memory that never move. Every layout starts from all slabs, so layouts share them."""

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
    """Allocates from an arena during one recording; tensors that are alive at the same time never overlap."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._free = [[(0, slab.nbytes)] for slab in arena.slabs]  # per slab: gaps (begin, end), ascending, apart

    def allocate(self, like: Tensor) -> Tensor:
        """Allocate a tensor with the shape, strides and dtype of `like`; its memory is free once its storage is."""
        size = -(-like.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
        number, begin = self._take(size)
        place = self._arena.slabs[number][begin : begin + size]
        weakref.finalize(place, self._release, number, begin, begin + size).atexit = False
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

    def _release(self, number: int, begin: int, end: int) -> None:
        merged: list[tuple[int, int]] = []
        for gap in sorted([*self._free[number], (begin, end)]):
            if merged and merged[-1][1] == gap[0]:
                merged[-1] = (merged[-1][0], gap[1])
            else:
                merged.append(gap)
        self._free[number] = merged
