"""Measure an exchange between ranks on this machine: `python -m bench.exchanges [--ranks 3] [--width 576]`.

Each backend in turn, several times: microseconds of wall time and of a rank's processor time for a sum of one row.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from penstock.ops import cpu
from penstock.parallel import Mesh, Segment, open_mesh

ROUNDS = 3


def measure(mesh: Mesh, width: int, num_calls: int) -> tuple[float, float]:
    """Return the microseconds of a call, of wall and of processor time."""
    x = torch.ones(1, width)
    for _ in range(10):
        mesh.all_reduce(x)
    wall, used = time.perf_counter(), time.process_time()
    for _ in range(num_calls):
        mesh.all_reduce(x)
    scale = 1e6 / num_calls
    return (time.perf_counter() - wall) * scale, (time.process_time() - used) * scale


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def run(addresses: Sequence[tuple[str, str | Segment]], rank: int, size: int, width: int, num_calls: int) -> None:
    """Be one rank of every mesh in turn; rank 0 prints what it finds."""
    cpu.set_num_threads(1)
    torch.set_num_threads(1)
    meshes = [(backend, open_mesh(backend, rank, size, address)) for backend, address in addresses]
    for _ in range(ROUNDS):
        for backend, mesh in meshes:
            wall_us, cpu_us = measure(mesh, width, num_calls)
            if rank == 0:
                print(f"{backend:5} {size} ranks, {width} values: {wall_us:8.1f} µs, {cpu_us:8.1f} µs of a processor")
    for _, mesh in meshes:
        mesh.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        rank, addresses = json.loads(given.as_rank)
        run(addresses, rank, given.ranks, given.width, given.calls)
        return
    segment, port = Segment(given.ranks), find_port()
    shared = ["--ranks", str(given.ranks), "--width", str(given.width), "--calls", str(given.calls)]
    places = [("shm", segment.address), ("gloo", f"127.0.0.1:{port}")]
    others = [
        subprocess.Popen([sys.executable, "-m", "bench.exchanges", *shared, "--as-rank", json.dumps([rank, places])])
        for rank in range(1, given.ranks)
    ]
    try:
        run([("shm", segment), places[1]], 0, given.ranks, given.width, given.calls)
    finally:
        for process in others:
            process.wait(30)


if __name__ == "__main__":
    main()
