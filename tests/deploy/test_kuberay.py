"""The commands of `deploy/kuberay.yaml`'s pods, run as Ray nodes on this machine."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.llm import tiny
from tests.server.running import free_port

MANIFEST = Path(__file__).parents[2] / "deploy/kuberay.yaml"
STORE = "--object-store-memory=100000000"
READY_S, NODE_S = 180.0, 60.0


def find_containers() -> tuple[dict[str, Any], dict[str, Any]]:
    documents = yaml.safe_load_all(MANIFEST.read_text())
    spec = next(document["spec"] for document in documents if document["kind"] == "RayCluster")
    groups = spec["headGroupSpec"], spec["workerGroupSpecs"][0]
    head, worker = (group["template"]["spec"]["containers"][0] for group in groups)
    return head, worker


@contextmanager
def run(container: dict[str, Any], script: str, env: dict[str, str]) -> Iterator[tuple[Any, list[str]]]:
    """Run a container's command as KubeRay would; all that it started ends with the block."""
    process = subprocess.Popen(
        [*container["command"], script],
        env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    lines: list[str] = []
    assert process.stdout is not None
    stdout = process.stdout
    reader = threading.Thread(target=lambda: lines.extend(stdout), daemon=True)
    reader.start()
    try:
        yield process, lines
    finally:
        for number, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 0.0)):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
                time.sleep(wait_s)
        process.wait()
        reader.join(10)
        stdout.close()


def wait_for(pattern: str, lines: list[str], wait_s: float) -> re.Match[str]:
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        if (found := re.search(pattern, "".join(lines))) is not None:
            return found
        time.sleep(0.2)
    raise AssertionError(f"no {pattern!r} in {wait_s:g} s:\n" + "".join(lines))


@pytest.mark.slow
def test_the_pods_commands_make_a_server_of_three_ranks(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    tiny.write_config(tmp_path, vocab_size=320, max_position_embeddings=4096, num_hidden_layers=3)
    tiny.write_tokenizer(tmp_path)
    head, worker = find_containers()
    port, folder = free_port(), f"/tmp/ray-{secrets.token_hex(3)}"  # paths of its sockets must be short
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RAY_PORT": str(port)}
    env = {**os.environ, **own, "RAY_ADDRESS": f"127.0.0.1:{port}", "PENSTOCK_DISTRIBUTED_SECRET": "x" * 32}
    start = f"--port={port} --num-cpus=0 --include-dashboard=false --temp-dir={folder} --block {STORE}"
    options = f"{tmp_path} --load-format dummy --max-model-len 512 --port 0"
    script = head["args"][0].replace("penstock serve smollm2", f"{sys.executable} -m penstock serve {options}")
    assert options in script
    try:
        with run(head, script.replace("--threads=2", "--threads=1"), make_env(env, f"--head {start}")) as (server, log):
            wait_for("Ray runtime started", log, NODE_S)
            join = f"--address=127.0.0.1:{port} --num-cpus=1 --block {STORE} --node-manager-port"
            with (
                run(worker, worker["args"][0], make_env(env, f"{join}={free_port()}")) as (_, first),
                started(first),
                run(worker, worker["args"][0], make_env(env, f"{join}={free_port()}")) as (_, second),
                started(second),
            ):
                url = f"http://127.0.0.1:{wait_for(r'listening on http://[^:]*:([0-9]+)', log, READY_S)[1]}"
                body = {"prompt": "ab", "max_tokens": 4, "ignore_eos": True}
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
                assert answer["usage"]["completion_tokens"] == 4
                assert len(httpx.get(f"{url}/info").json()["models"][0]["ranks"]) == 3
                server.send_signal(signal.SIGTERM)
                assert server.wait(60) == 0 and "stopping" in "".join(log)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_env(env: dict[str, str], start: str) -> dict[str, str]:
    return {**env, "KUBERAY_GEN_RAY_START_CMD": f"ray start {start}"}


@contextmanager
def started(log: list[str]) -> Iterator[None]:
    """Wait for a node before the next is started: two at once on one address may miss each other."""
    wait_for("Ray runtime started", log, NODE_S)
    yield
