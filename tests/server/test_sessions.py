"""Sessions of the HTTP API: kept, saved and erased by name, each tenant's apart."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer

TEXT = "Once upon a time there was a fox who could not stop counting the stars. " * 8


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("kept")
    keys: Path = folder / "keys"
    keys.write_text("one alice\ntwo bob\n")
    arguments = ("smollm2", "--max-model-len", "1024", "--api-key-file", str(keys))
    with RunningServer(
        *arguments, "--kv-offloading-path", str(folder / "kv"), "--threads", "1", "--admin-key", "boss"
    ) as running:
        yield running


def post(server: RunningServer, path: str, key: str = "one", **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=120)


def ask(server: RunningServer, key: str = "one", **body: Any) -> dict[str, Any]:
    answer = post(server, "/v1/completions", key, prompt=TEXT, max_tokens=4, temperature=0, **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def engine_pid(server: RunningServer) -> int:
    info = httpx.get(f"{server.url}/info", headers={"Authorization": "Bearer boss"}).json()
    return int(info["models"][0]["pid"])


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_saved_session_is_restored_after_the_engine_is_replaced(kept: RunningServer) -> None:
    cold = ask(kept, session="story", session_ttl=300)
    assert cached(cold) == 0
    saved = post(kept, "/v1/sessions/save", session="story")
    assert saved.status_code == 200 and saved.json()["num_tokens"] > 100
    os.kill(engine_pid(kept), signal.SIGKILL)
    assert cached(again := ask(kept)) > 100 and again["choices"] == cold["choices"]
    ask(kept, session="story")
    assert post(kept, "/v1/sessions/erase", session="story").json()["num_tokens"] == saved.json()["num_tokens"]
    assert post(kept, "/v1/sessions/erase", session="story").status_code == 404
    other = ask(kept, "two")
    assert cached(other) == 0 and other["choices"] == cold["choices"], "another tenant's prefixes are its own"


def test_sessions_are_each_tenants_own(kept: RunningServer) -> None:
    ask(kept, session="mine")
    refused = post(kept, "/v1/sessions/save", "two", session="mine")
    assert refused.status_code == 404
    assert refused.json()["error"]["message"] == "there is no session 'mine': send a request with it first"
    assert post(kept, "/v1/sessions/save", "one", session="mine").status_code == 200


@pytest.mark.parametrize(
    "body",
    [{"session": ""}, {"session": "x" * 129}, {"session_ttl": 0}, {"cache_priority": 101}, {"cache_priority": -1}],
)
def test_bad_fields_are_refused(kept: RunningServer, body: dict[str, Any]) -> None:
    answer = post(kept, "/v1/completions", prompt="Hi", max_tokens=1, **body)
    assert answer.status_code == 400 and next(iter(body)) in answer.json()["error"]["message"]
