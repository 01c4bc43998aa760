"""DRY, XTC and mirostat over the API, and through an engine's death."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer

VALUES: dict[str, Any] = {
    "prompt": "the cat sat on the mat",
    "temperature": 1.0,
    "seed": 5,
    "max_tokens": 300,
    "ignore_eos": True,
    "return_token_ids": True,
    "dry_multiplier": 0.8,
    "xtc_probability": 0.3,
}


def test_values_reach_the_engine(server: RunningServer) -> None:
    """One string many times, at temperature 0; DRY ends it."""
    body = {
        "prompt": "one two three one two three one two three one two three one two",
        "temperature": 0,
        "max_tokens": 6,
    }
    texts = [
        httpx.post(f"{server.url}/v1/completions", json={**body, **more}, timeout=60).json()["choices"][0]["text"]
        for more in ({}, {"dry_multiplier": 50.0}, {"dry_multiplier": 50.0, "dry_sequence_breakers": ["two"]})
    ]
    assert "three one" in texts[0] and "three" not in texts[1].split()[:1] and texts[2] != texts[1]
    bad = httpx.post(f"{server.url}/v1/completions", json={**body, "mirostat": 3}, timeout=60)
    assert bad.status_code == 400 and "mirostat" in bad.text


@pytest.mark.slow
@pytest.mark.parametrize("version", [0, 1, 2])
def test_a_stream_outlives_its_engine(tiny_model: Path, version: int) -> None:
    """mu goes on where it was: the same tokens as without a death."""
    values = {**VALUES, "mirostat": version, "mirostat_tau": 3.0}
    with RunningServer(str(tiny_model), "--load-format", "dummy", "--threads", "1") as server:
        url = f"{server.url}/v1/completions"
        whole = httpx.post(url, json=values, timeout=60).json()["choices"][0]["token_ids"]
        tokens: list[int] = []
        pid, killed = server.engine_pid(), False
        with httpx.stream("POST", url, json={**values, "stream": True}, timeout=60) as response:
            for line in response.iter_lines():
                for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                    tokens += choice.get("token_ids") or []
                    if not killed and len(tokens) > 20:
                        os.kill(pid, signal.SIGKILL)
                        killed = True
        assert killed and server.engine_pid() != pid
        assert tokens == whole
