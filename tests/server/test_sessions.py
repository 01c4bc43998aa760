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


def test_a_saved_session_is_restored_by_route(kept: RunningServer) -> None:
    """Into the cache of an engine that has begun anew, where it is kept again."""
    text = "The lighthouse keeper wrote down every ship that passed. " * 12
    asked: dict[str, Any] = {"prompt": text, "max_tokens": 4, "temperature": 0}
    cold = post(kept, "/v1/completions", session="ships", **asked).json()
    num_saved = post(kept, "/v1/sessions/save", session="ships").json()["num_tokens"]
    assert 100 < num_saved <= cold["usage"]["total_tokens"]
    os.kill(engine_pid(kept), signal.SIGKILL)
    kept.wait_ready()
    restored = post(kept, "/v1/sessions/restore", session="ships", session_ttl=60)
    assert restored.status_code == 200, restored.text
    assert restored.json() == {"session": "ships", "num_tokens": num_saved, "num_cached_tokens": num_saved - 16}
    assert post(kept, "/v1/sessions/save", session="ships").json()["num_tokens"] == num_saved, "it is kept again"
    again = post(kept, "/v1/completions", **asked).json()
    assert cached(again) >= num_saved - 16 and again["choices"] == cold["choices"]
    assert post(kept, "/v1/sessions/erase", session="ships").json()["num_tokens"] == num_saved
    gone = post(kept, "/v1/sessions/restore", session="ships")
    assert gone.status_code == 404 and "no session was saved as 'ships': save it first" in gone.text


def test_a_session_is_restored_by_its_tenant_and_salt_alone(kept: RunningServer) -> None:
    ask(kept, session="own", cache_salt="pepper")
    assert post(kept, "/v1/sessions/save", session="own").status_code == 200
    assert post(kept, "/v1/sessions/restore", "two", session="own", cache_salt="pepper").status_code == 404
    refused = post(kept, "/v1/sessions/restore", session="own")
    assert refused.status_code == 400 and "another adapter or cache_salt" in refused.json()["error"]["message"]
    assert post(kept, "/v1/sessions/restore", session="own", cache_salt="pepper").status_code == 200
    admin = httpx.post(f"{kept.url}/admin/reset_prefix_cache", headers={"Authorization": "Bearer boss"})
    assert admin.status_code == 200
    assert post(kept, "/v1/sessions/restore", session="own", cache_salt="pepper").status_code == 404


def test_slots_of_llama_server_are_sessions(kept: RunningServer) -> None:
    """As its users do it: a request in a slot, save the slot to a file, restore the file into a slot."""
    asked: dict[str, Any] = {
        "prompt": "Seven foxes counted eight stars. " * 20,
        "max_tokens": 4,
        "temperature": 0,
        "id_slot": 3,
    }
    cold = post(kept, "/v1/completions", **asked).json()
    saved = post(kept, "/slots/3?action=save", filename="foxes.bin").json()
    assert saved["id_slot"] == 3 and saved["filename"] == "foxes.bin" and saved["n_saved"] > 100
    assert saved["n_written"] > 1000 * saved["n_saved"] and saved["timings"]["save_ms"] > 0
    os.kill(engine_pid(kept), signal.SIGKILL)
    kept.wait_ready()
    restored = post(kept, "/slots/5?action=restore", filename="foxes.bin").json()
    assert restored["n_restored"] == saved["n_saved"] and restored["n_read"] == saved["n_written"]
    again = post(kept, "/v1/completions", **{**asked, "id_slot": 5}).json()
    assert cached(again) >= saved["n_saved"] - 16 and again["choices"] == cold["choices"]
    erased = httpx.post(f"{kept.url}/slots/5?action=erase", headers={"Authorization": "Bearer one"})
    assert erased.json()["id_slot"] == 5 and erased.json()["n_erased"] >= saved["n_saved"]
    assert post(kept, "/slots/5?action=erase").status_code == 404
    assert post(kept, "/slots/5?action=restore", "two", filename="foxes.bin").status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/slots/3", {"filename": "a"}, "add ?action=save, restore or erase"),
        ("/slots/3?action=drop", {"filename": "a"}, "action='drop' is unknown"),
        ("/slots/x?action=save", {"filename": "a"}, "there is no slot 'x': give one of 0 to"),
        ("/slots/99999?action=erase", {}, "there is no slot '99999'"),
        ("/slots/-1?action=erase", {}, "there is no slot '-1'"),
        ("/slots/3?action=save", {}, "filename"),
        ("/slots/3?action=save", {"filename": ""}, "filename"),
    ],
)
def test_bad_slots_are_refused(kept: RunningServer, path: str, body: dict[str, Any], says: str) -> None:
    answer = post(kept, path, **body)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_slots_are_listed_for_the_admin(kept: RunningServer) -> None:
    boss = {"Authorization": "Bearer boss"}
    assert httpx.get(f"{kept.url}/slots", headers={"Authorization": "Bearer one"}).status_code == 403
    body = {"prompt": TEXT, "max_tokens": 700, "ignore_eos": True, "stream": True, "id_slot": 7, "temperature": 0}
    headers = {"Authorization": "Bearer one"}
    with httpx.stream("POST", f"{kept.url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
        lines = answer.iter_lines()  # closed when collected, and the connection with it
        next(line for line in lines if line.startswith("data: "))
        busy = httpx.get(f"{kept.url}/slots", headers=boss).json()
    assert [slot["id"] for slot in busy] == list(range(len(busy))) and len(busy) > 8
    assert [slot["id"] for slot in busy if slot["is_processing"]] == [7]
    assert busy[7]["n_ctx"] == 1024 and busy[7]["params"]["n_predict"] == 700 and busy[7]["next_token"]["n_remain"] > 0
    assert "prompt" not in busy[7]
    assert httpx.get(f"{kept.url}/slots?fail_on_no_slot=1", headers=boss).status_code == 200
