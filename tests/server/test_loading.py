"""`/admin/models`: the models of a running server, their memory, and how they are loaded and unloaded."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from penstock import hub
from penstock.server.ollama import models
from tests.llm import tiny
from tests.server.running import RunningServer

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Serves the first of two good models on disk, beside one that is damaged."""
    home = tmp_path_factory.mktemp("home")
    for name in ("one", HOSTILE):
        tiny.write_config(home / "models" / name, vocab_size=320, max_position_embeddings=4096)
        tiny.write_tokenizer(home / "models" / name)
    (home / "models" / "bad").mkdir()
    (home / "models" / "bad" / "config.json").write_text('{"model_type": "nothing", "architectures": ["Nothing"]}')
    with RunningServer("one", "--load-format", "dummy", env={"PENSTOCK_HOME": str(home)}) as server:
        yield server


def ask(running: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{running.url}/admin/models").json()
    return found


def tell(running: RunningServer, what: str, name: str) -> httpx.Response:
    return httpx.post(f"{running.url}/admin/models/{what}", json={"model": name}, timeout=60)


def look(running: RunningServer) -> dict[str, Any]:
    with httpx.stream("GET", f"{running.url}/admin/live", timeout=20) as answer:
        line = next(line for line in answer.iter_lines() if line)
        found: dict[str, Any] = json.loads(line.removeprefix("data: "))
        return found


def test_models_and_their_memory_are_listed(running: RunningServer) -> None:
    shown = ask(running)
    (one,) = shown["models"]
    assert (one["name"], one["state"], one["is_default"], one["is_loaded"]) == ("one", "ready", True, True)
    assert one["cache_bytes"] > 0 and one["file_bytes"] > 0  # its weights are in no file
    assert one["resident_bytes"] > one["cache_bytes"]
    assert {model["name"] for model in shown["stored"]} == {HOSTILE, "bad"}
    assert shown["can_add"] and shown["memory"]["free_bytes"] > 0 and shown["memory"]["budget_bytes"] is None


def test_a_model_on_disk_is_loaded_and_unloaded(running: RunningServer) -> None:
    loaded = tell(running, "load", HOSTILE)
    assert loaded.status_code == 200 and loaded.json()["is_loaded"], loaded.text
    assert [model["name"] for model in look(running)["models"]] == ["one", HOSTILE]
    unloaded = tell(running, "unload", HOSTILE)
    assert unloaded.status_code == 200 and unloaded.json()["state"] == "unloaded"
    model = look(running)["models"][1]
    assert (model["state"], model["rates"], model["blocks"]) == ("unloaded", None, None)
    assert HOSTILE not in {model["name"] for model in ask(running)["stored"]}


def test_what_cannot_be_loaded_says_why(running: RunningServer) -> None:
    missing = tell(running, "load", "/etc")
    assert missing.status_code == 404 and "neither served nor on disk" in missing.json()["error"]["message"]
    assert tell(running, "load", "").status_code == 400
    bad = tell(running, "load", "bad")
    assert 400 <= bad.status_code < 600 and "nothing" in bad.json()["error"]["message"].lower()
    states = {model["name"]: model["state"] for model in look(running)["models"]}
    assert states["bad"].startswith("failed: ") and states["one"] == "ready"
    assert {model["name"]: model["state"] for model in ask(running)["models"]} == states
    assert tell(running, "unload", "bad").status_code == 200
    assert tell(running, "unload", "nobody").status_code == 404


def test_loading_can_be_stopped(running: RunningServer) -> None:
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(tell(running, "load", HOSTILE)))
    thread.start()
    end = time.monotonic() + 20
    while time.monotonic() < end and look(running)["models"][1]["state"] != "loading":
        time.sleep(0.01)
    assert tell(running, "unload", HOSTILE).json()["state"] == "unloaded"
    thread.join(30)
    told = answers[0].json()
    if answers[0].status_code == 200:
        assert told["is_loaded"]  # it was faster
    else:
        assert HOSTILE in told["error"]["message"] and "loaded" in told["error"]["message"]


def test_a_busy_model_stays(running: RunningServer) -> None:
    body = {"prompt": list(range(20, 60)), "max_tokens": 3000, "ignore_eos": True}

    def complete() -> None:
        answers.append(httpx.post(f"{running.url}/v1/completions", json=body, timeout=60))

    answers: list[httpx.Response] = []
    thread = threading.Thread(target=complete)
    thread.start()
    end = time.monotonic() + 20
    while time.monotonic() < end and not (ask(running)["models"][0]["is_busy"]):
        time.sleep(0.01)
    refused = tell(running, "unload", "one")
    thread.join()
    assert refused.status_code == 409 and "try again when they have ended" in refused.json()["error"]["message"]
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 3000


def test_a_pull_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go = threading.Event()

    def pull(name: str, revision: str | None, tell: Callable[[str, int, int | None], None]) -> None:
        tell("part 1", 5, None)
        tell("part 2", 10, 100)
        may_go.wait(10)

    async def read() -> list[dict[str, Any]]:
        lines = []
        async for line in models._fetch("some/model", catalog):
            lines.append(json.loads(line))
            if "completed" in lines[-1]:
                may_go.set()
        return lines

    monkeypatch.setattr(models, "PROGRESS_S", 0.01)
    monkeypatch.setattr(hub, "pull", pull)
    added: list[str] = []
    catalog: Any = SimpleNamespace(add=added.append)
    first, *rest = asyncio.run(read())
    assert first == {"status": "pulling manifest"} and rest[-1] == {"status": "success"} and added == ["some/model"]
    told = next(line for line in rest if "completed" in line)
    assert (told["status"], told["completed"], told["total"]) == ("pulling part 2", 10, 100)
    assert told["digest"].startswith("sha256:")


def test_rates_begin_anew_with_another_engine(running: RunningServer) -> None:
    """A model that was unloaded counts from zero again, which is no negative rate."""
    body = {"prompt": [7] * 40, "max_tokens": 50, "ignore_eos": True}
    with httpx.stream("GET", f"{running.url}/admin/live", timeout=20) as answer:
        looks = (json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line)
        next(looks)
        httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
        next(looks)
        assert tell(running, "unload", "one").status_code == 200
        assert tell(running, "load", "one").status_code == 200
        for _ in range(3):
            rates = next(looks)["models"][0]["rates"] or {}
            assert all(rate is None or rate >= 0 for rate in rates.values())
