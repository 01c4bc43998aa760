"""The interface of a mesh, the mesh of one rank, and how meshes are opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from penstock.errors import InvalidConfig

if TYPE_CHECKING:
    from penstock.parallel.shared import Segment

BACKENDS = ("shm", "gloo", "nccl")
DEFAULT_TIMEOUT_S = 60.0


class Mesh(Protocol):
    """Ranks 0 … size − 1. All ranks make the same collective calls in the same order, with tensors of the same rows.

    A call that cannot be finished, because a rank is gone or too late, raises `RankLost`, and so does every later one.
    """

    rank: int
    size: int

    def all_gather(self, x: Tensor, widths: Sequence[int] | None = None) -> Tensor:
        """x[T, widths[rank]] of each rank → [T, Σ widths], in the order of ranks; by default all are equally wide."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add x of all ranks. On a CPU they are added in their order: x₀ + x₁ + …, the same bits on every rank."""

    def close(self) -> None:
        """Leave the mesh. Ranks that wait for this one fail at once."""


class OneRank:
    """A mesh without others: nothing is exchanged."""

    rank, size = 0, 1

    def all_gather(self, x: Tensor, widths: Sequence[int] | None = None) -> Tensor:
        return x

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def close(self) -> None:
        """Nothing is held."""


def open_mesh(
    backend: str,
    rank: int,
    size: int,
    address: str | Segment = "",
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    exact: bool = False,
) -> Mesh:
    """Open this rank's end of a mesh, and wait up to `timeout_s` for the others.

    `address`: of `shm`, a `Segment` or its `address`; of `gloo` and `nccl`, `host:port` on which rank 0 listens.
    `exact`: add in the order of ranks on a GPU too. One rank needs no backend and no address, but `nccl` gives it one
    of its own, which a step can be captured with.
    """
    if size < 1 or not 0 <= rank < size:
        raise InvalidConfig(f"rank={rank} is not one of {size} ranks: they are numbered from 0")
    if backend not in BACKENDS:
        raise InvalidConfig(f"mesh backend {backend!r} is unknown: use one of {', '.join(BACKENDS)}")
    if size == 1 and backend != "nccl":
        return OneRank()
    if backend == "shm":
        from penstock.parallel.shared import join_segment

        return join_segment(rank, size, address, timeout_s)
    from penstock.parallel.torch_mesh import open_gloo, open_nccl

    if not isinstance(address, str) or not address:
        raise InvalidConfig(f"a {backend} mesh needs the address host:port on which rank 0 listens")
    return (
        open_gloo(rank, size, address, timeout_s)
        if backend == "gloo"
        else open_nccl(rank, size, address, timeout_s, exact)
    )
