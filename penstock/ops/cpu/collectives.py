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
_broadcast = _Collective("mesh_broadcast", "pnpn")
_send = _Collective("mesh_send", "pnpn")
_receive = _Collective("mesh_receive", "pnpn")


def _library() -> Any:
    return library._library


def are_available() -> bool:
    return library.path() != "reference"


def segment_bytes(size: int, slot_bytes: int, mail_bytes: int) -> int:
    """Count the bytes of the segment of `size` ranks: two slots for each, and a mailbox for each pair."""
    function = _library().penstock_mesh_bytes
    function.argtypes, function.restype = [ctypes.c_int64] * 3, ctypes.c_int64
    return int(function(size, slot_bytes, mail_bytes))


class SharedSegment:
    """A rank's end of a segment: a mapped file, of which its lock shows the others that it lives."""

    def __init__(self, file: int, rank: int, size: int, slot_bytes: int, mail_bytes: int, timeout_s: float) -> None:
        open_segment = _library().penstock_mesh_open
        open_segment.argtypes = [ctypes.c_int32, *[ctypes.c_int64] * 5]
        open_segment.restype = ctypes.c_void_p
        address = open_segment(file, rank, size, slot_bytes, mail_bytes, int(timeout_s * 1000))
        if not address:
            raise OSError(f"the segment of rank {rank} of {size} cannot be mapped, or the rank is taken")
        self.address: int = address
        self.rank, self.size = rank, size
        self._widths: dict[tuple[int, ...], tuple[Any, int]] = {}  # tapes name them, so they are kept

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
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

    def reduce(self, x: Tensor) -> Tensor:
        """Add x of all ranks, in their order."""
        x = check_float32("x", x).contiguous()
        out = torch.empty(x.shape)
        _reduce(self.address, x.data_ptr(), x.numel(), out.data_ptr())
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Overwrite x, which must be contiguous, with that of rank `source`."""
        _broadcast(self.address, source, _whole(x).data_ptr(), x.nbytes)
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Leave x for one rank; two letters wait in its mailbox, a third until it has read one."""
        x = x.contiguous()
        _send(self.address, self._other(to), x.data_ptr(), x.nbytes)

    def receive(self, into: Tensor, source: int) -> Tensor:
        """Overwrite a contiguous tensor with what one rank has sent."""
        _receive(self.address, self._other(source), _whole(into).data_ptr(), into.nbytes)
        return into

    def _other(self, rank: int) -> int:
        if rank == self.rank or not 0 <= rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size} cannot exchange with rank {rank}")
        return rank

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


def _whole(x: Tensor) -> Tensor:
    if not x.is_contiguous():
        raise ValueError(f"a tensor {tuple(x.shape)} with strides {x.stride()} cannot be written as one run of bytes")
    return x
