"""A server whose engines have roles: one computes prompts, the other answers, through a store that both share."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.errors import InvalidConfig
from penstock.server.config import ServerConfig
from penstock.server.engines.process import Launch
from tests.server.running import RunningServer
from tests.server.streams import Said, chats, run_all

TEXT = "The quick brown fox jumps over the lazy dog, and nobody knows why. "


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = str(tmp_path_factory.mktemp("store"))
    arguments = ("smollm2", "--max-model-len", "2048", "--role", "prefill", "--role", "decode", "--hang-timeout", "8")
    with RunningServer(*arguments, "--kv-offloading-path", folder, "--kv-offloading-size", "0.2") as running:
        yield running


def complete(server: RunningServer, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/completions", json={"temperature": 0, **body}, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def list_replicas(server: RunningServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{server.url}/info").json()["models"][0]["replicas"]
    return found


def test_a_long_prompt_is_computed_by_one_and_answered_by_the_other(
    server: RunningServer, roles: RunningServer
) -> None:
    prompt = TEXT * 20
    for options in ({"max_tokens": 12}, {"max_tokens": 6, "n": 3, "temperature": 0.9, "seed": 5}, {"max_tokens": 1}):
        handed, whole = complete(roles, prompt=prompt, **options), complete(server, prompt=prompt, **options)
        assert handed["choices"] == whole["choices"] and handed["usage"]["completion_tokens"] > 0
        prompt = "Again. " + prompt
    timeline = httpx.get(f"{roles.url}/admin/requests/{handed['id']}").json()
    assert timeline["replicas"][0] == 0, "even an answer of one token"
    first = complete(roles, prompt="At last. " + prompt, max_tokens=4)
    assert httpx.get(f"{roles.url}/admin/requests/{first['id']}").json()["replicas"] == [0, 1]


def test_short_prompts_and_known_ones_stay_with_the_decoder(roles: RunningServer) -> None:
    text = "A story that goes on. " * 20
    replicas = []
    for _ in range(2):
        answer = complete(roles, prompt=text, max_tokens=4)
        replicas.append(httpx.get(f"{roles.url}/admin/requests/{answer['id']}").json()["replicas"])
        text += answer["choices"][0]["text"] + " And then? "
    short = complete(roles, prompt="Once upon a time", max_tokens=2)
    replicas.append(httpx.get(f"{roles.url}/admin/requests/{short['id']}").json()["replicas"])
    assert replicas == [[0, 1], [1], [1]]


@pytest.mark.parametrize(
    ("number", "how"),
    [
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.slow),
        (1, signal.SIGKILL),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_streams_outlive_either(server: RunningServer, roles: RunningServer, number: int, how: int) -> None:
    """One that is stopped is found by its silence, and replaced."""
    asked = chats(6)
    alone = asyncio.run(run_all(server.url, asked))
    lost = list_replicas(roles)[number]["pid"]

    async def kill(counts: list[int]) -> None:
        while sum(count > 2 for count in counts) < 2:
            await asyncio.sleep(0.01)
        os.kill(lost, how)

    def results(said: list[Said]) -> list[tuple[str, str | None, list[int]]]:
        return [(one.text, one.finish_reason, one.token_ids) for one in said]

    assert results(asyncio.run(run_all(roles.url, asked, kill))) == results(alone)
    end = time.monotonic() + 60
    while any(one["state"] != "ready" for one in list_replicas(roles)) and time.monotonic() < end:
        time.sleep(0.1)
    assert list_replicas(roles)[number]["pid"] != lost
    assert complete(roles, prompt=TEXT * 10, max_tokens=2)["choices"], "both do their work again"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"role": ("prefill", "sleep")}, "role='sleep' is unknown: choose one of prefill, decode, both"),
        ({"role": ("prefill", "prefill")}, "role=prefill is all there is: add an engine with role=decode or both"),
        ({"role": ("decode",)}, "role=decode is all there is: add an engine with role=prefill or both"),
        ({"role": ("both", "both"), "data_parallel_size": 3}, "2 roles for data_parallel_size=3 engines: give one"),
    ],
)
def test_roles_that_leave_work_to_nobody_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        ServerConfig(**options)


def test_roles_without_a_prefix_cache_are_refused(tmp_path: Path) -> None:
    options = {"kv_offloading_path": str(tmp_path), "enable_prefix_caching": False}
    with pytest.raises(InvalidConfig, match="enable_prefix_caching=False: leave one of them out"):
        Launch("m", options, tmp_path, 2, roles=("prefill", "decode"))
