"""Collectives of processes that share a segment of memory. They are kernels, so that steps with them can be taped."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RankLost
from penstock.ops.cpu.runtime import library
from penstock.ops.cpu.runtime.library import Kernel, as_rows, check_float32

DEAD, LATE, CLOSED = 1, 2, 3
MAX_RANKS = 64


class _Collective(Kernel):
    def make_error(self) -> Exception:
        rank, why = divmod(_library().penstock_mesh_failure(), 256)
        reasons = {DEAD: "has died", LATE: "did not come within the mesh's time limit", CLOSED: "has left the mesh"}
        return RankLost(f"rank {rank} {reasons.get(why, 'failed')}: the ranks' step cannot be finished", rank)


_gather = _Collective("mesh_gather", "ppnnpp")
_reduce = _Collective("mesh_reduce", "ppnp")


def _library() -> Any:
    return library._library


def are_available() -> bool:
    return library.path() != "reference"


def segment_bytes(size: int, slot_bytes: int) -> int:
    """Count the bytes of the segment of `size` ranks, with two slots for each."""
    function = _library().penstock_mesh_bytes
    function.argtypes, function.restype = [ctypes.c_int64] * 2, ctypes.c_int64
    return int(function(size, slot_bytes))


class SharedSegment:
    """A rank's end of a segment, which is a mapped file. The lock that it holds shows the others that it lives."""

    def __init__(self, file: int, rank: int, size: int, slot_bytes: int, timeout_s: float) -> None:
        open_segment = _library().penstock_mesh_open
        open_segment.argtypes = [ctypes.c_int32, *[ctypes.c_int64] * 4]
        open_segment.restype = ctypes.c_void_p
        address = open_segment(file, rank, size, slot_bytes, int(timeout_s * 1000))
        if not address:
            raise OSError(f"the segment of rank {rank} of {size} cannot be mapped, or the rank is taken")
        self.address: int = address
        self.rank, self.size = rank, size
        self._widths: dict[tuple[int, ...], tuple[Any, int]] = {}  # tapes name them, so they are kept

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """x[T, widths[rank]] of each rank → [T, Σ widths]."""
        x = as_rows("x", x)
        numbers, total = self._find_widths(tuple(widths))
        if x.dim() != 2 or x.shape[1] != widths[self.rank]:
            raise ValueError(f"x {tuple(x.shape)} is not {widths[self.rank]} wide, as rank {self.rank}'s part is")
        out = torch.empty(x.shape[0], total)
        _gather(self.address, x.data_ptr(), x.stride(0), x.shape[0], ctypes.addressof(numbers), out.data_ptr())
        return out

    def _find_widths(self, widths: tuple[int, ...]) -> tuple[Any, int]:
        if widths not in self._widths:
            if len(widths) != self.size:
                raise ValueError(f"{len(widths)} widths for {self.size} ranks")
            self._widths[widths] = (ctypes.c_int64 * self.size)(*widths), sum(widths)
        return self._widths[widths]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add x of all ranks, in their order."""
        x = check_float32("x", x).contiguous()
        out = torch.empty(x.shape)
        _reduce(self.address, x.data_ptr(), x.numel(), out.data_ptr())
        return out

    def is_alive(self, rank: int) -> bool:
        """Return True if a process holds the lock of another rank."""
        function = _library().penstock_mesh_is_alive
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int32
        return bool(function(self.address, rank))

    def close(self) -> None:
        """Leave: ranks that wait for this one fail, and so do its own calls from now on."""
        function = _library().penstock_mesh_close
        function.argtypes, function.restype = [ctypes.c_void_p], None
        function(self.address)
