"""Two machines without Ray: the server on one, a rank on the other, which are two command lines here."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.files.convert import tiny_model
from tests.hardening.pem import write_pem
from tests.parallel.processes import ranks_of, wait_gone
from tests.parallel.test_faults import results
from tests.server.running import RunningServer, free_port
from tests.server.streams import chats, run_all

OPTIONS = ("--load-format", "dummy", "--max-model-len", "512", "--threads", "1", "-pp", "2", "--nnodes", "2")


@contextmanager
def machine(*arguments: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Another machine's command line."""
    command = [sys.executable, "-m", "penstock", "serve", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **env}) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("has_tls", [False, True])
def test_streams_go_on_when_either_side_dies(has_tls: bool, talker: str, tmp_path: Path) -> None:
    secret, port = tmp_path / "secret", str(free_port())
    secret.write_text("0123456789abcdef0123456789abcdef")
    both = [talker, *OPTIONS, "--master-port", port, "--distributed-secret-file", str(secret)]
    if has_tls:
        certificate, key = map(str, write_pem(tmp_path))
        both += ["--distributed-tls-certfile", certificate, "--distributed-tls-keyfile", key]
        both += ["--distributed-tls-ca", certificate]
    with machine(*both, "--node-rank", "1") as other, RunningServer(*both) as server:
        undisturbed = asyncio.run(run_all(server.url, chats(4)))
        assert all(one.error is None and len(one.token_ids) == 48 for one in undisturbed)
        assert len(ranks_of(other.pid)) == 1 and not ranks_of(server.engine_pid())
        for victim in (server.engine_pid, lambda: ranks_of(other.pid)[0]):

            async def end(counts: list[int]) -> None:
                while sum(count > 2 for count in counts) < 2:
                    await asyncio.sleep(0.001)
                os.kill(victim(), signal.SIGKILL)  # noqa: B023

            said = asyncio.run(run_all(server.url, chats(4), end))
            assert results(said) == results(undisturbed)
        ranks = ranks_of(other.pid)
        other.send_signal(signal.SIGTERM)
        assert other.wait(20) == 0
        assert wait_gone(ranks)


@pytest.mark.slow
def test_wrong_secret_and_other_options(talker: str) -> None:
    """The other machine's command ends with one line; rank 0 goes on waiting, or ends with the line, too."""
    port = str(free_port())
    both = (talker, *OPTIONS, "--master-port", port)
    right, wrong = "0123456789abcdef", "fedcba9876543210"
    with machine(*both, "--port", "0", PENSTOCK_DISTRIBUTED_SECRET=right) as first:
        with machine(*both, "--node-rank", "1", PENSTOCK_DISTRIBUTED_SECRET=wrong) as other:
            assert other.wait(60) == 1
            assert other.stderr is not None
            assert f"error: rank 1: 127.0.0.1:{port} has another secret" in other.stderr.read()
        assert first.poll() is None
        odd = ("--node-rank", "1", "--kv-cache-dtype", "float32")
        with machine(*both, *odd, PENSTOCK_DISTRIBUTED_SECRET=right) as other:
            assert other.wait(60) == 1
            assert other.stderr is not None
            assert "error: rank 1 has kv_cache_dtype='float32', but rank 0 has 'auto'" in other.stderr.read()
        assert first.wait(60) == 1
        assert first.stderr is not None
        assert "rank 1 has kv_cache_dtype='float32', but rank 0 has 'auto'" in first.stderr.read()


@pytest.mark.slow
def test_a_fine_tune_on_the_other_machine_is_refused(tmp_path: Path) -> None:
    """Same config, same headers: both commands end with a line that names a tensor."""
    folders = [str(tmp_path / name) for name in ("base", "tuned")]
    for seed, folder in enumerate(folders):
        tiny_model("llama").save_pretrained(folder)
        if seed:
            tensors = load_file(f"{folder}/model.safetensors")
            tensors["model.norm.weight"] += 0.01
            save_file(tensors, f"{folder}/model.safetensors", {"format": "pt"})
    port = str(free_port())
    options = ("-pp", "2", "--nnodes", "2", "--master-port", port, "--threads", "1", "--skip-tokenizer-init")
    secret = "0123456789abcdef"
    with (
        machine(folders[0], *options, "--port", "0", PENSTOCK_DISTRIBUTED_SECRET=secret) as first,
        machine(folders[1], *options, "--node-rank", "1", PENSTOCK_DISTRIBUTED_SECRET=secret) as other,
    ):
        assert (other.wait(60), first.wait(60)) == (1, 1)
        for each in (first, other):
            assert each.stderr is not None
            assert "rank 1 has other weights: 1 of " in (said := each.stderr.read()), said
            assert "the first is model.norm.weight='float32" in said


def test_secret_is_required(talker: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "penstock", "serve", talker, *OPTIONS, "--node-rank", "1"],
        capture_output=True,
        text=True,
        timeout=60,
        env={name: value for name, value in os.environ.items() if name != "PENSTOCK_DISTRIBUTED_SECRET"},
    )
    assert found.returncode == 1
    assert found.stderr.startswith("error: ranks on several machines prove a secret to each other")
    assert found.stderr.count("\n") == 1
