"""Meshes over torch's process groups: gloo between machines, NCCL between GPUs.

Groups are made directly, not as torch's one default group: a process may be in several meshes.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import ops
from penstock.errors import InvalidConfig, RankLost

R = TypeVar("R")


class TorchMesh:
    """Ranks of a torch process group."""

    def __init__(self, group: Any, rank: int, size: int, in_order: bool) -> None:
        self.rank, self.size, self.in_order = rank, size, in_order
        self._group = group
        self._failure: RankLost | None = None
        atexit.register(self.close)  # a group whose threads still run when Python is gone aborts the process

    def _finish(self, begin: Callable[[], Any]) -> None:
        """Begin an exchange and wait for it; after a failure the group is of no more use."""
        if self._failure is not None:
            raise self._failure
        try:
            begin().wait()
        except RuntimeError as error:
            self._failure = RankLost(
                f"a rank is gone or too late ({_shorten(error)}): the ranks' step cannot be finished"
            )
            raise self._failure from None

    def all_gather(self, x: Tensor, widths: Sequence[int] | None = None) -> Tensor:
        widths = tuple(widths or (x.shape[1],) * self.size)
        if len(set(widths)) == 1:
            parts = self._collect(x)
        else:  # all send as much: narrower ones are padded
            padded = x.new_zeros(x.shape[0], max(widths))
            padded[:, : x.shape[1]] = x
            parts = [part[:, :width] for part, width in zip(self._collect(padded), widths)]
        return torch.cat(parts, dim=1)

    def _collect(self, x: Tensor) -> list[Tensor]:
        """Return x of every rank."""
        x = x.contiguous()
        if not x.numel():
            return [x] * self.size
        parts = x.new_empty(self.size * len(x), *x.shape[1:])
        self._finish(lambda: self._group._allgather_base(parts, x))
        return list(torch.split(parts, len(x)))

    def all_reduce(self, x: Tensor) -> Tensor:
        if not self.in_order:
            total = x.clone()
            self._finish(lambda: self._group.allreduce([total]))
            return total
        first, *others = self._collect(x.contiguous().view(1, -1))
        for part in others:
            first = ops.add(first, part)
        return first.view(x.shape)

    def close(self) -> None:
        self._failure = self._failure or RankLost(f"rank {self.rank} has left the mesh")
        self._group = None  # its connections close
        atexit.unregister(self.close)


def _shorten(error: Exception) -> str:
    """Return the first sentence of torch's message, without the place in its source."""
    return str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0][:120]


def _make_store(rank: int, size: int, address: str, timeout_s: float) -> Any:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidConfig(f"mesh address {address!r} is no host:port, such as 10.0.0.1:29500")
    timeout, make_store = timedelta(seconds=timeout_s), torch.distributed.TCPStore  # type: ignore[attr-defined]
    try:
        store = make_store(host.strip("[]"), int(port), size, rank == 0, timeout, wait_for_workers=False)
        store.set_timeout(timeout)
    except RuntimeError as error:
        raise RankLost(f"rank {rank} of {size} cannot reach {address}: {_shorten(error)}", rank) from None
    return store


def open_gloo(rank: int, size: int, address: str, timeout_s: float) -> TorchMesh:
    """Open a mesh over TCP."""
    return _open(
        lambda store: dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s)),
        rank,
        size,
        address,
        timeout_s,
        True,
    )


def open_nccl(rank: int, size: int, address: str, timeout_s: float, exact: bool) -> TorchMesh:
    """Open a mesh of the current GPUs of its processes. Its calls can be captured in a CUDA graph."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        raise InvalidConfig("a nccl mesh needs NVIDIA GPUs and a torch that has NCCL: use shm or gloo on CPUs")
    if size > torch.cuda.device_count() and ":" in address and address.startswith(("127.", "localhost")):
        raise InvalidConfig(f"{size} ranks need {size} GPUs, {torch.cuda.device_count()} are here: use fewer ranks")

    def make(store: Any) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupNCCL(store, rank, size, options)

    return _open(make, rank, size, address, timeout_s, exact)


def _open(
    make: Callable[[Any], Any], rank: int, size: int, address: str, timeout_s: float, in_order: bool
) -> TorchMesh:
    store = _make_store(rank, size, address, timeout_s)
    try:
        return TorchMesh(make(store), rank, size, in_order)
    except RuntimeError as error:
        raise RankLost(
            f"not all of {size} ranks joined at {address} within {timeout_s:g} s: {_shorten(error)}"
        ) from None
