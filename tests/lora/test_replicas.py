"""Adapters of a server with two engines."""

from __future__ import annotations

import os
import signal
import time

import httpx

from tests.lora.conftest import Lab
from tests.server.running import RunningServer
from tests.server.test_replicas import list_replicas


def test_adapters_reach_every_replica_and_its_successor(lab: Lab) -> None:
    ask = {"prompt": "Tell me.", "max_tokens": 8, "temperature": 0, "ignore_eos": True}

    def say(server: RunningServer, name: str) -> str:
        answer = httpx.post(f"{server.url}/v1/completions", json={**ask, "model": name}, timeout=60).json()
        return str(answer["choices"][0]["text"])

    with RunningServer(
        lab.base, "--served-model-name", "base", "--device", "cpu", "--enable-lora", "--max-lora-rank", "64", "-dp", "2"
    ) as server:
        told = {"lora_name": "one", "lora_path": str(lab.folders[0])}
        assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=told, timeout=60).status_code == 200
        base, adapted = say(server, "base"), say(server, "one")
        assert base != adapted
        for number in (0, 1):  # each answers alone while the other restarts
            os.kill(list_replicas(server)[number]["pid"], signal.SIGKILL)
            assert say(server, "one") == adapted
            while sum(one["state"] == "ready" for one in list_replicas(server)) < 2:
                time.sleep(0.05)
        bad = {"lora_name": "two", "lora_path": "/nowhere"}
        assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=bad, timeout=60).status_code == 400
        assert httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "one"}).status_code == 200
        assert httpx.post(f"{server.url}/v1/completions", json={**ask, "model": "one"}).status_code == 404
