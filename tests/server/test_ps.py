"""`penstock ps` and `penstock stop`."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from penstock.cli import main
from penstock.commands.ps import readable_seconds
from penstock.server.pidfile import list_servers, pid_folder, write_pidfile
from tests.server.running import RunningServer


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "seconds, shown", [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 d")]
)
def test_times(seconds: float, shown: str) -> None:
    assert readable_seconds(seconds) == shown


def test_what_a_dead_server_left_is_cleared() -> None:
    pid_folder().mkdir()
    left = pid_folder() / "1.json"  # a process that lives, and is no server of ours
    left.write_text(json.dumps({"pid": 1, "url": "http://127.0.0.1:1", "models": ["m"], "started_s": 0.0}))
    assert list_servers() == [] and not left.exists()


def test_a_register_that_cannot_be_written_stops_nobody(home: Path) -> None:
    (home / "run").write_text("")
    with write_pidfile("http://127.0.0.1:1", ["m"]):
        pass


def test_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps"]) == 0 and "no server runs" in capsys.readouterr().err
    assert main(["ps", "--json"]) == 0 and json.loads(capsys.readouterr().out) == []
    assert main(["stop"]) == 1 and "no server runs" in capsys.readouterr().err


@contextmanager
def one_request(server: RunningServer, max_tokens: int) -> Iterator[None]:
    """A request that the engine has and does not answer within the block."""
    asking = threading.Thread(
        target=httpx.post,
        args=(server.url + "/v1/completions",),
        kwargs={"json": {"prompt": "x", "max_tokens": max_tokens}, "timeout": 60},
    )
    os.kill(server.engine_pid(), signal.SIGSTOP)
    try:
        asking.start()
        headers = {"Authorization": "Bearer secret"}
        while not httpx.get(server.url + "/admin/running", headers=headers).json()["requests"]:
            time.sleep(0.02)
        yield
    finally:
        os.kill(server.engine_pid(), signal.SIGCONT)
        asking.join()


def test_ps_and_stop(home: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (str(tiny_model), "--served-model-name", "tiny", "--load-format", "dummy", "--admin-key", "secret")
    with RunningServer(*arguments, env={"PENSTOCK_HOME": str(home)}) as server:
        with one_request(server, max_tokens=40):
            assert main(["ps", "--json", "--api-key", "secret"]) == 0
            [shown] = json.loads(capsys.readouterr().out)
            assert (shown["pid"], shown["url"], shown["models"]) == (server.process.pid, server.url, ["tiny"])
            assert [request["max_tokens"] for request in shown["requests"]] == [40]
            assert main(["ps", "--api-key", "secret"]) == 0
            rows = capsys.readouterr().out.splitlines()
            assert rows[0].split() == ["PID", "URL", "MODELS", "UP", "RUNNING", "WAITING"]
            assert rows[1].split()[-2:] == ["1", "0"] and "running" in rows[-1]
            assert main(["ps"]) == 0 and "admin key" in capsys.readouterr().out
        assert main(["stop", "99"]) == 1 and str(server.process.pid) in capsys.readouterr().err
        assert main(["stop", server.url.replace("127.0.0.1", "localhost") + "/"]) == 0
        assert server.process.wait(5) == 0 and list_servers() == []
        assert list((home / "run").iterdir()) == []


@pytest.mark.slow
def test_stop_says_how_to_force_it(home: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunningServer(str(tiny_model), "--load-format", "dummy", env={"PENSTOCK_HOME": str(home)}) as server:
        server.process.send_signal(signal.SIGSTOP)
        try:
            assert main(["stop", str(server.process.pid), "--timeout", "0.2"]) == 1
            assert f"kill -9 {server.process.pid}" in capsys.readouterr().err
        finally:
            threading.Timer(0.3, server.process.send_signal, [signal.SIGCONT]).start()
        begun = time.monotonic()
        assert main(["stop"]) == 0 and time.monotonic() - begun > 0.2
