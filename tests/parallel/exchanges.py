"""Exchanges of a mesh in every way, for rank processes that import little else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.parallel import Mesh


def make_parts(rank: int, num_rows: int) -> torch.Tensor:
    """What a rank gives to an exchange: wide enough for every test."""
    return torch.randn(num_rows, 4001, generator=torch.Generator().manual_seed(rank))


def exchange(mesh: Mesh, widths: Sequence[int], num_rows: int) -> dict[str, torch.Tensor]:
    x = make_parts(mesh.rank, num_rows)
    return {"gather": mesh.all_gather(x[:, : widths[mesh.rank]], widths), "reduce": mesh.all_reduce(x)}
