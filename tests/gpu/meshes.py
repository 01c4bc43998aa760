"""A mesh of GPUs. One GPU can hold one rank only, whose exchanges must be the identity, in a captured step too."""

from __future__ import annotations

import socket

import torch

from penstock.parallel import Mesh, open_mesh
from tests.gpu.check import Skip, check, require
from tests.gpu.models import DEVICE


def open_one(exact: bool) -> Mesh:
    if DEVICE == "cpu":
        raise Skip("NCCL needs a GPU")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return open_mesh("nccl", 0, 1, f"127.0.0.1:{port}", timeout_s=60, exact=exact)


@check([(False,), (True,)])
def nccl_in_a_graph(exact: bool) -> None:
    """A product between exchanges, captured once and replayed with other inputs."""
    mesh = open_one(exact)
    x, weight = torch.randn(4, 64, device=DEVICE), torch.randn(64, 64, device=DEVICE)

    def step() -> torch.Tensor:
        return mesh.all_reduce(mesh.all_gather(mesh.all_gather(x) @ weight, (64,)))

    require(torch.equal(step(), x @ weight), "the exchanges of one rank change its values")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = step()
    for _ in range(3):
        x.copy_(torch.randn(4, 64))
        graph.replay()
        torch.cuda.synchronize()
        require(torch.equal(result, x @ weight), "a replayed step gives something else")
    mesh.close()
