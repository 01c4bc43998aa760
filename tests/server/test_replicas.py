"""A server with two engines: its streams go on when one dies, and everything that is told reaches both."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer
from tests.server.streams import Said, chats, run_all

NUM = 8


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    arguments = ("smollm2", "--max-model-len", "2048", "-dp", "2", "--enable-lora")
    with RunningServer(*arguments) as running:
        yield running


def _results(said: list[Said]) -> list[tuple[str, str | None, list[int]]]:
    return [(one.text, one.finish_reason, one.token_ids) for one in said]


def list_replicas(server: RunningServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{server.url}/info").json()["models"][0]["replicas"]
    return found


def test_killed_replica_loses_no_token(server: RunningServer, replicas: RunningServer) -> None:
    alone = asyncio.run(run_all(server.url, chats(NUM)))

    async def kill(counts: list[int]) -> None:
        while sum(count > 5 for count in counts) < NUM // 2:
            await asyncio.sleep(0.01)
        os.kill(list_replicas(replicas)[0]["pid"], signal.SIGKILL)

    said = asyncio.run(run_all(replicas.url, chats(NUM), kill))
    assert _results(said) == _results(alone)
    end = time.monotonic() + 60
    while sum(one["state"] == "ready" for one in list_replicas(replicas)) < 2 and time.monotonic() < end:
        assert httpx.get(f"{replicas.url}/health/ready").status_code == 200
        time.sleep(0.1)
    shown = list_replicas(replicas)
    assert [one["restarts"] for one in shown] == [1, 0]
    assert shown[1]["output_tokens"]  # the other's may have died with it: they are told every second


def test_metrics_explain_and_health_name_replicas(replicas: RunningServer) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 2, "temperature": 0}
    answer = httpx.post(f"{replicas.url}/v1/completions", json=body).json()
    timeline = httpx.get(f"{replicas.url}/admin/requests/{answer['id']}").json()
    assert timeline["replicas"] in ([0], [1])
    page = httpx.get(f"{replicas.url}/metrics").text
    for number in (0, 1):
        assert f'penstock:engine_ready{{model_name="smollm2",replica="{number}"}} 1.0' in page
    assert httpx.get(f"{replicas.url}/health/ready").json() == {"status": "ready", "replicas": 2, "replicas_ready": 2}
    threads = {one["name"]: one for one in httpx.get(f"{replicas.url}/info").json()["models"][0]["settings"]}["threads"]
    assert threads["value"] == max(1, len(os.sched_getaffinity(0)) // 2) and "2 replicas" in threads["why"]


def test_live_view_shows_both(replicas: RunningServer) -> None:
    with httpx.stream("GET", f"{replicas.url}/admin/live") as stream:
        line = next(line for line in stream.iter_lines() if line.startswith("data: "))
    (model,) = json.loads(line[6:])["models"]
    assert [one["replica"] for one in model["replicas"]] == [0, 1]
    assert model["blocks"]["num"] == sum(one["blocks"] for one in model["replicas"])


def test_turns_of_a_conversation_stay_on_one_replica(replicas: RunningServer) -> None:
    places = []
    for talk in range(4):
        text = f"Conversation {talk}. " + "The quick brown fox jumps over the lazy dog. " * 10
        for _ in range(3):
            body = {"prompt": text, "max_tokens": 2, "temperature": 0}
            answer = httpx.post(f"{replicas.url}/v1/completions", json=body, timeout=60).json()
            places.append(httpx.get(f"{replicas.url}/admin/requests/{answer['id']}").json()["replicas"][0])
            text += answer["choices"][0]["text"] + " And then? "
    talks = [places[at : at + 3] for at in range(0, 12, 3)]
    assert all(len(set(talk)) == 1 for talk in talks) and len(set(places)) == 2
