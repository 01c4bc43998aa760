"""Adapters of a server with two engines."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx

from tests.lora.conftest import Lab
from tests.server.routing import route
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
        assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=bad, timeout=60).status_code == 404
        assert httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "one"}).status_code == 200
        assert httpx.post(f"{server.url}/v1/completions", json={**ask, "model": "one"}).status_code == 404


def test_adapters_are_loaded_on_every_server_of_a_router(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "router.key").write_text("sesame")
    flags = ("--served-model-name", "base", "--threads", "1", "--enable-lora", "--max-lora-rank", "64")
    own = ("--router-key-file", str(tmp_path / "router.key"))
    with (
        RunningServer(lab.base, *flags, *own) as one,
        RunningServer(lab.base, *flags, *own) as two,
        route([one, two], tmp_path, "--admin-key", "boss") as router,
        httpx.Client(timeout=60) as client,
    ):
        admin, told = {"x-api-key": "boss"}, {"lora_name": "one", "lora_path": str(lab.folders[0])}
        assert client.post(f"{router.url}/v1/load_lora_adapter", json=told).status_code == 403
        assert client.post(f"{router.url}/v1/load_lora_adapter", json=told, headers=admin).status_code == 200
        again = client.post(f"{router.url}/v1/load_lora_adapter", json=told, headers=admin)
        assert again.status_code == 400 and "already loaded" in again.text
        ask = {"prompt": "Tell me.", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "model": "one"}
        said = {
            client.post(f"{server.url}/v1/completions", json=ask).json()["choices"][0]["text"]
            for server in (one, two, router)
        }
        assert len(said) == 1
        listed = client.get(f"{router.url}/v1/models").json()["data"]
        assert [card["id"] for card in listed] == ["base", "one"]
        told = {"lora_name": "one"}
        assert client.post(f"{router.url}/v1/unload_lora_adapter", json=told, headers=admin).status_code == 200
        assert client.post(f"{router.url}/v1/completions", json=ask).status_code == 404
