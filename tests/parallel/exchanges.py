"""Exchanges of a mesh in every way, for rank processes that import little else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.parallel import Mesh


def make_parts(rank: int, num_rows: int) -> torch.Tensor:
    """What a rank gives to an exchange: wide enough for every test."""
    return torch.randn(num_rows, 4001, generator=torch.Generator().manual_seed(rank))


def exchange(mesh: Mesh, widths: Sequence[int], num_rows: int) -> dict[str, torch.Tensor]:
    """Exchange in every way, in a ring where ranks send to one another."""
    x = make_parts(mesh.rank, num_rows)
    found = {"gather": mesh.gather(x[:, : widths[mesh.rank]], widths), "reduce": mesh.reduce(x)}
    found["broadcast"] = mesh.broadcast(x.clone(), mesh.size - 1)
    following, before = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    for sender in range(mesh.size):
        if mesh.rank == sender:
            mesh.send(x, following)
        if before == sender:
            found["received"] = mesh.receive(torch.empty_like(x), before)
    return found
