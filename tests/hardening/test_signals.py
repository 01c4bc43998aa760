"""Signals: all that ask a server to end let it finish its answers, and SIGHUP reads keys and certificates again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.hardening.commands import HANG_S, TINY
from tests.hardening.pem import write_pem
from tests.server.running import RunningServer

STREAM = {"prompt": [20], "max_tokens": 1500, "stream": True, "ignore_eos": True}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """For the sockets, and short enough for them."""
    folder = Path("/tmp") / f"p{os.getpid()}-{abs(hash(tmp_path)) % 10**6}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGQUIT,
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR2, marks=pytest.mark.slow),
    ],
)
def test_answers_are_finished_and_nothing_stays(tiny_model: Path, place: Path, number: int) -> None:
    running = RunningServer(str(tiny_model), *TINY, env={"TMPDIR": str(place)})
    with running:
        assert [path.name[:8] for path in place.iterdir()] == ["penstock"]
        with httpx.stream("POST", f"{running.url}/v1/completions", json=STREAM, timeout=HANG_S) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            running.process.send_signal(number)
            assert list(lines)[-1] == "data: [DONE]"
        assert running.process.wait(HANG_S) == 0
    assert list(place.iterdir()) == []


def test_a_signal_while_loading_leaves_nothing(tiny_model: Path, place: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "serve", str(tiny_model), *TINY, "--port", "0"],
        env={**os.environ, "TMPDIR": str(place)},
        stderr=subprocess.DEVNULL,
    )
    try:
        while not list(place.iterdir()) and process.poll() is None:
            pass
        process.send_signal(signal.SIGQUIT)
        assert process.wait(HANG_S) in (0, 128 + signal.SIGQUIT)
    finally:
        process.kill()
        process.wait()
    assert list(place.iterdir()) == []


def test_interrupted_import_of_the_command_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import signal, time; signal.raise_signal(signal.SIGINT); time.sleep(60)")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-m", "penstock"], env=env, capture_output=True, timeout=HANG_S)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGINT, b"")


SWALLOWED = """
import signal, sys

class Swallow:
    def __del__(self):  # Python ignores exceptions here, as in the callbacks of an import
        signal.raise_signal({number})
        print("signalled", file=sys.stderr)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            Swallow()

sys.meta_path.insert(0, Finder())
from penstock.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    "module, number",
    [("uvloop", signal.SIGQUIT), ("uvloop", signal.SIGINT), ("penstock.server.run", signal.SIGTERM)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_signal_where_exceptions_are_swallowed(tiny_model: Path, place: Path, module: str, number: int) -> None:
    program = SWALLOWED.format(module=module, number=int(number))
    done = subprocess.run(
        [sys.executable, "-c", program, "serve", str(tiny_model), *TINY, "--port", "0"],
        env={**os.environ, "TMPDIR": str(place)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 128 + number
    assert done.stderr == ("signalled\n" if module == "uvloop" else "")  # before that one the process ends at once
    assert list(place.iterdir()) == []


def status(running: RunningServer, key: str) -> int:
    return httpx.get(f"{running.url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code


def test_hangup_reads_keys_again(tiny_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-secret alice\n")
    with RunningServer(str(tiny_model), *TINY, "--api-key-file", str(keys)) as running:
        assert (status(running, "first-secret"), status(running, "second-secret")) == (200, 401)
        keys.write_text("second-secret alice\n")
        running.process.send_signal(signal.SIGHUP)
        running.wait_for("reloaded keys")
        assert (status(running, "first-secret"), status(running, "second-secret")) == (401, 200)
        keys.write_text("")
        running.process.send_signal(signal.SIGHUP)
        running.wait_for("cannot reload keys")
        assert (status(running, "first-secret"), status(running, "second-secret")) == (401, 200)


def common_name(url: str) -> str:
    """Of the certificate that the server shows."""
    address = (httpx.URL(url).host, httpx.URL(url).port or 0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(address, HANG_S) as plain, closing(context.wrap_socket(plain)) as line:
        der = line.getpeercert(binary_form=True)
    assert der is not None
    pem = subprocess.run(
        ["openssl", "x509", "-inform", "der", "-noout", "-subject"], input=der, capture_output=True, check=True
    ).stdout
    return pem.decode().rpartition("=")[2].strip()


@pytest.mark.slow
def test_hangup_reads_certificates_again(tiny_model: Path, tmp_path: Path) -> None:
    """A pair that does not belong together leaves the old one in use, also for connections to come."""
    certificate, key = write_pem(tmp_path / "used", "first")
    newer = write_pem(tmp_path / "newer", "second")
    context = ssl.create_default_context(cafile=str(certificate))
    flags = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    with RunningServer(str(tiny_model), *TINY, *flags, verify=context) as running:
        assert common_name(running.url) == "first"
        shutil.copy(newer[0], certificate)
        running.process.send_signal(signal.SIGHUP)
        running.wait_for("cannot reload certificates")
        assert common_name(running.url) == "first"
        shutil.copy(newer[1], key)
        running.process.send_signal(signal.SIGHUP)
        running.wait_for("reloaded certificates")
        assert common_name(running.url) == "second"


@pytest.mark.slow
def test_hangup_under_nohup_and_with_nothing_to_read(tiny_model: Path) -> None:
    program = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); from penstock.cli import main; "
        "sys.exit(main())"
    )
    with RunningServer(str(tiny_model), *TINY, command=(sys.executable, "-c", program, "serve")) as running:
        running.process.send_signal(signal.SIGHUP)
        running.wait_for("reloaded ")
        assert httpx.get(f"{running.url}/health/ready").status_code == 200
