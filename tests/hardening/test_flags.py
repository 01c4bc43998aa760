"""Flags, option files and the files they name: what cannot be is one sentence, before any engine is started."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.server.run import RELOADING, STOPPING
from tests.hardening.commands import HANG_S, TINY
from tests.hardening.pem import write_pem
from tests.server.running import free_port

Refuse = Callable[..., str]


@pytest.fixture
def untouched() -> Iterator[None]:
    """Put back what a server sets in its process before it begins."""
    handlers, level = logging.root.handlers[:], logging.root.level
    signals = {number: signal.getsignal(number) for number in (*STOPPING, RELOADING)}
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    for number, handler in signals.items():
        signal.signal(number, handler)


@pytest.fixture
def refuse(
    tiny_model: Path, untouched: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refuse:
    """Give `penstock serve` flags that it must refuse; the sentence. Nothing may come as far as the event loop."""

    def begin(work: Any, **options: Any) -> None:
        work.close()
        raise AssertionError("the server was started")

    def run(*flags: str, command: str = "serve") -> str:
        monkeypatch.setattr(asyncio, "run", begin)
        port = [] if "--port" in flags or "--config" in flags else ["--port", "0"]
        status = main(
            [command, str(tiny_model), *TINY, *port, *flags] if command == "serve" else [*command.split(), *flags]
        )
        err = capsys.readouterr().err
        assert status in (1, 2) and err.startswith("error: ") and err.count("\n") == 1, (flags, status, err)
        assert "unexpected" not in err and len(err) < 1000, err
        return err

    return run


@pytest.mark.parametrize(
    "flag",
    ["memory-budget-gb", "request-timeout", "keep-alive", "shutdown-timeout", "hang-timeout", "gpu-memory-utilization"],
)
def test_numbers_that_are_none(refuse: Refuse, flag: str) -> None:
    for value in ("nan", "inf", "-inf", "-1", "1e300", "-nan", "Infinity"):
        said = refuse(f"--{flag}", value)
        assert flag.replace("-", "_") in said and "it must be" in said, said


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("seed", [str(2**64), str(-(2**63) - 1), "9" * 400]),
        ("port", ["65536", "-1", "1e3"]),
        ("kv-cache-tokens", ["0", str(2**63), str(-(2**63))]),
        ("max-model-len", ["0", str(2**64)]),
        ("max-num-seqs", ["0", "65536"]),
        ("max-num-batched-tokens", ["0", str(2**63)]),
        ("threads", ["0", "1000"]),
        ("block-size", ["0", "1024"]),
        ("max-body-mb", ["0", "2000"]),
        ("max-queued-requests", ["0", str(2**70)]),
        ("max-queued-tokens", ["0", str(2**70)]),
    ],
)
def test_counts_out_of_range(refuse: Refuse, flag: str, values: list[str]) -> None:
    for value in values:
        said = refuse(f"--{flag}", value)
        assert flag in said.replace("_", "-"), said


@pytest.mark.parametrize(
    "text",
    [
        "port: x",
        "port: [1]",
        "port: true",
        "port: 1.5",
        "port: {a: 1}",
        "port: 99999",
        "port: 2020-01-01",
        "port: !!int x",
        "port: 0x" + "f" * 5000,
        "port: " + "9" * 5000,
        "host: 5",
        "host: [a]",
        'host: "a\\0b"',
        "request_timeout: .nan",
        "request-timeout: .inf",
        "request_timeout: soon",
        "api_key: 5",
        "api_key: [1, 2]",
        "api_key: {a: b}",
        "seed: 1e400",
        "seed: 18446744073709551616",
        "enforce_eager: 3",
        "log_format: [text]",
        "nonsense: 1",
        "model: {a: b}",
        "- a",
        "a: b: c",
        "a: \x01",
        "[" * 100_000,
        "a: " + "[" * 100_000,
        "2020-13-41: 1",
        "port: &a [*a]",
        "? [a]\n: b",
        "--- a\n--- b",
        "!!python/object/apply:os.system [true]",
    ],
    ids=lambda text: text[:20],
)
def test_option_files_in_yaml(refuse: Refuse, tmp_path: Path, text: str) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    assert "cannot listen" not in refuse("--config", str(path))


@pytest.mark.parametrize(
    "text",
    [
        b"port = 'x'",
        b"port = [1]",
        b"port = 1979-05-27",
        b"seed = " + b"9" * 5000,
        b"request_timeout = nan",
        b"a = \xff",
        b"a = " + b"[" * 100_000,
        b"x" * 100,
    ],
    ids=lambda text: text[:20].decode(errors="replace"),
)
def test_option_files_in_toml(refuse: Refuse, tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "options.toml"
    path.write_bytes(text)
    assert "cannot listen" not in refuse("--config", str(path))


def test_one_string_where_several_may_stand(tmp_path: Path) -> None:
    """Its letters are not a list of keys."""
    from penstock.commands.flags.config_file import read_options

    path = tmp_path / "options.yaml"
    path.write_text("api_key: secret\npublic-prefix: [a, b]\n")
    assert read_options(str(path))[2] == {"api_key": ("secret",), "public_prefix": ("a", "b")}


@pytest.mark.parametrize(
    "flags",
    [
        ["--config", "{}.yaml"],
        ["--api-key-file", "{}"],
        ["--public-prefix", "{}"],
        ["--ssl-certfile", "{}", "--ssl-keyfile", "{}"],
    ],
    ids=lambda flags: flags[0][2:],
)
def test_files_that_are_none(refuse: Refuse, tmp_path: Path, flags: list[str]) -> None:
    """A pipe would be waited for, and the rest would fill the memory."""
    suffix = ".yaml" if flags[0] == "--config" else ""
    folder, pipe, sparse = (tmp_path / f"{name}{suffix}" for name in ("folder", "pipe", "sparse"))
    folder.mkdir()
    os.mkfifo(pipe)
    with open(sparse, "wb") as file:
        file.truncate(1 << 40)
    link = tmp_path / f"zero{suffix}"
    link.symlink_to("/dev/zero")
    for path in (folder, pipe, sparse, link, tmp_path / f"missing{suffix}"):
        said = refuse(*(flag.replace("{}.yaml", "{}").replace("{}", str(path)) for flag in flags))
        assert str(path) in said and "cannot" in said, said


def test_certificates(refuse: Refuse, tmp_path: Path) -> None:
    certificate, key = (str(path) for path in write_pem(tmp_path / "one"))
    _, other = (str(path) for path in write_pem(tmp_path / "two"))
    locked, broken = tmp_path / "locked.pem", tmp_path / "broken.pem"
    subprocess.run(
        ["openssl", "rsa", "-aes128", "-passout", "pass:secret", "-in", key, "-out", str(locked)],
        check=True,
        capture_output=True,
    )
    broken.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    assert "MISMATCH" in refuse("--ssl-certfile", certificate, "--ssl-keyfile", other)
    assert "password" in refuse("--ssl-certfile", certificate, "--ssl-keyfile", str(locked))
    for pair in ((str(broken), key), (certificate, str(broken)), (key, certificate), (os.devnull, os.devnull)):
        assert "ssl_certfile" in refuse("--ssl-certfile", pair[0], "--ssl-keyfile", pair[1])
    assert "give both" in refuse("--ssl-certfile", certificate)


def test_hosts(refuse: Refuse) -> None:
    for host in ("256.0.0.1", "no such host", "x" * 300, ".", "::g", "1.2.3.4"):
        assert "cannot listen on" in refuse("--host", host)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "in use" in refuse("--port", str(taken.getsockname()[1]))


@pytest.mark.slow
def test_two_servers_race_for_one_port(tiny_model: Path) -> None:
    """Both may bind to it before either listens; the one that loses says so before it starts an engine."""
    arguments = [sys.executable, "-m", "penstock", "serve", str(tiny_model), *TINY, "--port", str(free_port())]
    both = [subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said: dict[int, list[str]] = {0: [], 1: []}

    def read(index: int) -> None:
        stream = both[index].stderr
        assert stream is not None
        for line in stream:
            said[index].append(line)
            if "listening on" in line:
                both[1 - index].wait(HANG_S)
                both[index].terminate()

    readers = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    try:
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(HANG_S)
        assert sorted(process.wait(HANG_S) for process in both) == [0, 1]
        loser = said[0 if both[0].returncode else 1]
        assert len(loser) == 1 and "cannot listen on '127.0.0.1'" in loser[0] and "in use" in loser[0]
    finally:
        for process in both:
            process.kill()
            process.communicate()


def test_other_commands(refuse: Refuse, tiny_model: Path, tmp_path: Path) -> None:
    model = str(tiny_model)
    assert "out of range" in refuse("--timeout", "nan", command="stop")
    assert "out of range" in refuse(model, *TINY, "--prompt-tokens", str(10**12), command="bench latency")
    assert "together" in refuse(
        model, *TINY, "--num-prompts", "1000000", "--prompt-tokens", "1000000", command="bench throughput"
    )
    assert "a device" in refuse(model, "/dev/zero", *TINY, command="perplexity")
    os.mkfifo(tmp_path / "pipe")
    assert "a pipe" in refuse(model, str(tmp_path / "pipe"), *TINY, command="perplexity")
    assert "window" in refuse(model, __file__, *TINY, "--window", str(10**30), command="perplexity")
    for flag, value in (("temperature", "nan"), ("temperature", "inf"), ("seed", str(2**64)), ("max-tokens", "0")):
        assert flag.replace("-", "_") in refuse(model, "hi", *TINY, f"--{flag}", value, command="run")
    for path in ("/dev/zero", str(tmp_path), str(tmp_path / "pipe")):
        assert "file" in refuse(path, "-o", str(tmp_path / "out"), "--model", model, *TINY, command="run-batch")


def test_a_batch_line_without_end(refuse: Refuse, tiny_model: Path, tmp_path: Path) -> None:
    with open(tmp_path / "in", "wb") as file:
        file.truncate(1 << 40)
    assert "one request per line" in refuse(
        str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--model", str(tiny_model), *TINY, command="run-batch"
    )
