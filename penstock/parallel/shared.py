"""The mesh of processes on one machine: they meet in a segment of shared memory."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import InvalidConfig, RankLost
from penstock.ops.cpu import collectives

SLOT_BYTES = 1 << 20  # of a rank's two slots: larger tensors go through in pieces


class Segment:
    """Shared memory for the ranks of one mesh. Make it in the process that starts them, and give them its `address`.

    On Linux it has no name in any folder, so nothing is left behind however its processes end. Elsewhere it is a file,
    which `unlink` removes; rank 0 does so once all have come.
    """

    def __init__(self, size: int, *, named: bool = not hasattr(os, "memfd_create")) -> None:
        if not collectives.are_available():
            raise InvalidConfig("ranks on one machine need the compiled kernels: unset PENSTOCK_CPU, or use gloo")
        if not 1 <= size <= collectives.MAX_RANKS:
            raise InvalidConfig(f"{size} ranks cannot share memory: 1 to {collectives.MAX_RANKS} can")
        self.size, self.path = size, None
        if named:
            folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # else where temporary files go
            self.file, path = tempfile.mkstemp(prefix="penstock-mesh-", dir=folder)  # mode 0600
            self.path, self.address = Path(path), path
        else:
            self.file = os.memfd_create("penstock-mesh")
            self.address = f"/proc/{os.getpid()}/fd/{self.file}"
        os.ftruncate(self.file, collectives.segment_bytes(size, SLOT_BYTES))

    def unlink(self) -> None:
        """Remove the file's name, if it has one; ranks that have come keep the memory."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give up the segment, of which no rank is open in this process."""
        self.unlink()
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class SharedMesh:
    """A rank of a segment."""

    def __init__(self, file: int, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size, self._file = rank, size, file
        self._end = collectives.SharedSegment(file, rank, size, SLOT_BYTES, timeout_s)

    def all_gather(self, x: Tensor, widths: Sequence[int] | None = None) -> Tensor:
        return self._end.all_gather(x, widths or (x.shape[1],) * self.size)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._end.all_reduce(x)

    def is_alive(self, rank: int) -> bool:
        """Return True if a living process is this rank."""
        return rank == self.rank or self._end.is_alive(rank)

    def close(self) -> None:
        self._end.close()
        if self._file >= 0:
            os.close(self._file)  # and with it the lock by which the others see this rank
            self._file = -1


def join_segment(rank: int, size: int, address: str | Segment, timeout_s: float) -> SharedMesh:
    """Open a rank's end and meet the others."""
    segment = address if isinstance(address, Segment) else None
    place = address.address if isinstance(address, Segment) else address
    try:
        if segment is not None:
            # A process's locks on a file end with the first of its descriptors that is closed: use the segment's own.
            file, segment.file = segment.file, -1
        else:
            file = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        wanted = collectives.segment_bytes(size, SLOT_BYTES)
        if os.fstat(file).st_size != wanted:
            os.close(file)
            raise InvalidConfig(f"the segment {place} was not made for {size} ranks: give all of them the same size")
        mesh = SharedMesh(file, rank, size, timeout_s)
    except OSError as error:
        raise InvalidConfig(f"rank {rank} of {size} cannot join the segment {place!r}: {error}") from None
    try:
        _meet(mesh, place, timeout_s)
    except BaseException:
        mesh.close()
        raise
    finally:
        if rank == 0 and not place.startswith("/proc/"):
            with suppress(OSError):
                os.unlink(place)
    return mesh


def _meet(mesh: SharedMesh, place: str, timeout_s: float) -> None:
    """Wait until every rank has joined; one that is late counts as alive."""
    end = time.monotonic() + timeout_s
    here = [False] * mesh.size
    while not all(here):
        here = [mesh.is_alive(rank) for rank in range(mesh.size)]
        if time.monotonic() > end:
            missing = ", ".join(str(rank) for rank, came in enumerate(here) if not came)
            raise RankLost(f"rank {missing} of {mesh.size} did not join within {timeout_s:g} s", here.index(False))
        time.sleep(0.002)
    mesh.all_reduce(torch.zeros(1))
