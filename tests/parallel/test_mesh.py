"""Collectives: what they give, and that every wait for a rank ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import InvalidConfig, RankLost
from penstock.ops.cpu.runtime.arena import Arena
from penstock.ops.cpu.runtime.tape import Tape, record
from penstock.parallel import Mesh, OneRank, Segment, open_mesh
from penstock.parallel.shared import SLOT_BYTES
from tests.parallel.exchanges import exchange, make_parts
from tests.parallel.group import Group

ROWS = [0, 1, 7, 300]
WIDTHS = [(64, 64, 64), (500, 3, 77), (1, 0, 1), (4001, 17, 900)]  # 300 rows of the last do not fit in a slot


def check_exchange(found: list[Any], widths: tuple[int, ...], num_rows: int) -> None:
    parts = [make_parts(rank, num_rows) for rank in range(len(widths))]
    gathered = torch.cat([part[:, :width] for part, width in zip(parts, widths)], dim=1)
    total = parts[0]
    for part in parts[1:]:
        total = total + part  # in the order of ranks: the same bits
    for each in found:
        assert torch.equal(each["gather"], gathered)
        assert torch.equal(each["reduce"], total)


@pytest.mark.parametrize("widths", WIDTHS)
def test_shared_memory_exchanges(group: Group, widths: tuple[int, ...]) -> None:
    assert SLOT_BYTES < 4 * 300 * 4001
    for num_rows in ROWS:
        check_exchange(group.run(3, exchange, widths=widths, num_rows=num_rows), widths, num_rows)


GLOO = """
import sys, torch
from penstock.errors import RankLost
from penstock.parallel import open_mesh
from tests.parallel.exchanges import exchange
mesh = open_mesh("gloo", int(sys.argv[1]), 2, "127.0.0.1:" + sys.argv[2], timeout_s=60)
torch.save(exchange(mesh, (500, 3), 7), sys.argv[3])
try:
    while mesh.rank == 0:  # the other one ends
        mesh.all_reduce(torch.ones(1, 1))
except RankLost as error:
    assert "a rank is gone or too late" in str(error)
"""


def test_gloo_exchanges(tmp_path: Path) -> None:
    """The same by processes that only know an address; one that ends is noticed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [str(tmp_path / f"{rank}.pt") for rank in range(2)]
    started = [subprocess.Popen([sys.executable, "-c", GLOO, str(rank), str(port), files[rank]]) for rank in range(2)]
    assert [each.wait(100) for each in started] == [0, 0]
    check_exchange([torch.load(file, weights_only=True) for file in files], (500, 3), 7)


def test_one_rank_exchanges_nothing() -> None:
    mesh, x = open_mesh("shm", 0, 1), torch.ones(2, 3)
    assert isinstance(mesh, OneRank)
    assert mesh.all_gather(x) is x and mesh.all_reduce(x) is x


@pytest.fixture
def pair() -> Iterator[tuple[Mesh, Group]]:
    """A mesh whose rank 0 is this process; rank 1 stays in an endless exchange until it is stopped or killed."""
    segment, made = Segment(2), Group(1)
    made.pipes[0].send((join, 1, {"address": segment.address}))
    mesh = open_mesh("shm", 0, 2, segment, timeout_s=30)
    yield mesh, made
    mesh.close()
    for process in made.processes:
        process.kill()
        process.join()


def pid_of(group: Group) -> int:
    pid = group.processes[0].pid
    assert pid is not None
    return int(pid)


def join(mesh: Mesh, address: str) -> None:
    """Be rank 1 of another mesh, for ever."""
    other = open_mesh("shm", 1, 2, address, timeout_s=30)
    while True:
        other.all_reduce(torch.ones(3))


def test_a_killed_peer_ends_the_wait(pair: tuple[Mesh, Group]) -> None:
    """Also in a replayed step; and every later call fails at once."""
    mesh, group = pair
    x = torch.ones(3)
    result, tape = record(lambda: mesh.all_reduce(x), Arena())
    assert isinstance(tape, Tape) and result.tolist() == [2.0] * 3
    assert tape.replay().tolist() == [2.0] * 3
    os.kill(pid_of(group), signal.SIGKILL)
    with pytest.raises(RankLost, match="rank 1 has died") as caught:
        for _ in range(3):
            tape.replay()
    assert caught.value.rank == 1
    with pytest.raises(RankLost, match="rank 1 has died"):
        mesh.all_gather(torch.ones(1, 1))
    mesh.close()
    with pytest.raises(RankLost, match="rank 0 has left the mesh"):
        tape.replay()


def test_a_stopped_peer_ends_the_wait() -> None:
    """It lives, but does not come: the time limit ends the wait."""
    segment, group = Segment(2), Group(1)
    group.pipes[0].send((join, 1, {"address": segment.address}))
    mesh = open_mesh("shm", 0, 2, segment, timeout_s=3)
    mesh.all_reduce(torch.ones(3))
    pid = pid_of(group)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(RankLost, match="rank 1 did not come within the mesh's time limit"):
            for _ in range(3):
                mesh.all_reduce(torch.ones(3))
    finally:
        mesh.close()
        os.kill(pid, signal.SIGKILL)


def test_a_rank_that_never_comes() -> None:
    begin = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 1, 2 of 3 did not join within 0\.2 s"):
        open_mesh("shm", 0, 3, Segment(3), timeout_s=0.2)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("named", [False, True])
def test_nothing_is_left_behind(named: bool) -> None:
    """A named segment loses its name once all have come, or the wait is over."""
    segment = Segment(2, named=named)
    place = Path(segment.address)
    assert place.exists()
    with pytest.raises(RankLost):
        open_mesh("shm", 0, 2, segment, timeout_s=0.1)
    assert not place.exists()


def test_wrong_meshes_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="rank=2 is not one of 2 ranks: they are numbered from 0"):
        open_mesh("shm", 2, 2, "")
    with pytest.raises(InvalidConfig, match="backend 'mpi' is unknown: use one of shm, gloo, nccl"):
        open_mesh("mpi", 0, 2, "")
    with pytest.raises(InvalidConfig, match="address 'here' is no host:port"):
        open_mesh("gloo", 0, 2, "here")
    with pytest.raises(InvalidConfig, match="65 ranks cannot share memory: 1 to 64 can"):
        Segment(65)
    with pytest.raises(InvalidConfig, match="rank 1 of 2 cannot join the segment '/nowhere'"):
        open_mesh("shm", 1, 2, "/nowhere")
    segment = Segment(2)
    with pytest.raises(InvalidConfig, match="was not made for 3 ranks: give all of them the same size"):
        open_mesh("shm", 1, 3, segment.address)
    segment.close()
    if not torch.cuda.is_available():
        with pytest.raises(InvalidConfig, match="a nccl mesh needs NVIDIA GPUs"):
            open_mesh("nccl", 0, 1, "127.0.0.1:1")
