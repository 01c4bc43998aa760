"""Connections that use up the file descriptors: engines, logs and those who come later do not notice."""

from __future__ import annotations

import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from penstock.server.connections.slots import max_connections
from tests.hardening.commands import HANG_S, TINY, penstock, sentence
from tests.hardening.pem import write_pem
from tests.server.running import RunningServer

LIMIT = 256
NUM_CONNECTIONS = 500


def limited(*arguments: str, verify: ssl.SSLContext | bool = True) -> RunningServer:
    """A server that may open LIMIT files and cannot raise that."""
    program = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT})); "
        "from penstock.cli import main; sys.exit(main())"
    )
    return RunningServer(*arguments, command=(sys.executable, "-c", program, "serve"), verify=verify)


@contextmanager
def silent_connections(url: str, count: int) -> Iterator[list[socket.socket]]:
    address = (httpx.URL(url).host, httpx.URL(url).port or 0)
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address, HANG_S)) for _ in range(count)]


def num_open(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_closed(connections: list[socket.socket]) -> int:
    """Connections that the server has closed."""
    count = 0
    for connection in connections:
        connection.setblocking(False)
        try:
            count += connection.recv(1) == b""
        except BlockingIOError:
            pass
        except ConnectionResetError:
            count += 1
    return count


@pytest.mark.slow
@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
def test_an_engine_that_dies_while_connections_are_at_their_limit(
    tiny_model: Path, tmp_path: Path, is_tls: bool
) -> None:
    """Silent connections are counted also before they have shaken hands."""
    files = write_pem(tmp_path) if is_tls else None
    flags = ["--ssl-certfile", str(files[0]), "--ssl-keyfile", str(files[1])] if files else []
    verify = ssl.create_default_context(cafile=str(files[0])) if files else True
    with (
        limited(str(tiny_model), *TINY, *flags, verify=verify) as running,
        httpx.Client(base_url=running.url, verify=verify, timeout=HANG_S) as client,
    ):
        pid = client.get("/info").json()["models"][0]["pid"]
        with silent_connections(running.url, NUM_CONNECTIONS) as connections:
            running.wait_for("refused ")
            assert num_open(running.process.pid) < LIMIT - 32
            os.kill(pid, signal.SIGKILL)
            running.wait_for("crashed (status -9)")
            answer = client.post("/v1/completions", json={"prompt": [20], "max_tokens": 4})  # on the line it had
            assert answer.status_code == 200, answer.text
            assert num_closed(connections) > 0
        later = httpx.post(
            f"{running.url}/v1/completions", json={"prompt": [20], "max_tokens": 4}, verify=verify, timeout=HANG_S
        )
        assert later.status_code == 200


def test_the_soft_limit_is_raised(tiny_model: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    program = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard})); "
        "from penstock.cli import main; sys.exit(main())"
    )
    with RunningServer(str(tiny_model), *TINY, command=(sys.executable, "-c", program, "serve")) as running:
        limits = Path(f"/proc/{running.process.pid}/limits").read_text().splitlines()
        soft = int(next(line for line in limits if line.startswith("Max open files")).split()[3])
        assert soft == min(hard, 65536)


def test_a_limit_too_low_is_a_sentence(tiny_model: Path, tmp_path: Path) -> None:
    limits = {resource.RLIMIT_NOFILE: 16}
    said = sentence(penstock("serve", str(tiny_model), *TINY, "--port", "0", limits=limits))
    assert "the limit of open files is 16" in said and "ulimit -n" in said
    (tmp_path / "in.jsonl").write_text("{}\n")
    said = sentence(penstock("run-batch", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), limits=limits))
    assert "the limit of open files is 16" in said


def test_some_are_kept_at_every_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (128, 256, 1024, 65536):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        assert 64 <= limit - max_connections() <= 256 and max_connections() >= limit // 2
