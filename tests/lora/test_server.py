"""Adapters of a server: under every API's name for them, loaded and unloaded while streams run and engines die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.lora.conftest import Lab
from tests.server.running import RunningServer
from tests.server.streams import Said, run_all

ASK = {"messages": [{"role": "user", "content": "Tell me."}], "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(lab: Lab) -> Iterator[RunningServer]:
    modules = [f"lora-{index}={lab.folders[index]}" for index in range(2)]
    with RunningServer(
        lab.base, "--served-model-name", "base", "--dtype", "float32", "--device", "cpu", "--threads", "1",
        "--enable-lora", "--max-lora-rank", "64", "--max-loras", "2", "--max-cpu-loras", "3",
        "--lora-modules", *modules,
    ) as running:  # fmt: skip
        yield running


def post(server: RunningServer, path: str, body: Any, status: int = 200) -> Any:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code == status, response.text
    is_json = response.headers["content-type"].startswith("application/json")
    return response.json() if is_json else response.text


def get(server: RunningServer, path: str) -> Any:
    response = httpx.get(f"{server.url}{path}")
    assert response.status_code == 200, response.text
    return response.json()


def ask(server: RunningServer, model: str = "base", **more: Any) -> str:
    return str(
        post(server, "/v1/chat/completions", {**ASK, "model": model, **more})["choices"][0]["message"]["content"]
    )


def load(server: RunningServer, name: str, path: Path | str, status: int = 200, **more: Any) -> Any:
    return post(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more}, status)


def unload(server: RunningServer, name: str, status: int = 200) -> Any:
    return post(server, "/v1/unload_lora_adapter", {"lora_name": name}, status)


def test_an_adapter_is_a_model_in_every_api(server: RunningServer, lab: Lab) -> None:
    cards = {card["id"]: card for card in get(server, "/v1/models")["data"]}
    assert list(cards) == ["base", "lora-0", "lora-1"]
    assert cards["lora-0"]["parent"] == "base" and cards["lora-0"]["root"] == str(lab.folders[0])
    assert get(server, "/v1/models/lora-1") == cards["lora-1"]
    base, one = ask(server), ask(server, "lora-0")
    assert base != one != ask(server, "lora-1")
    text = {"prompt": "Tell me.", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    plain, adapted = (
        post(server, "/v1/completions", {**text, "model": name})["choices"][0]["text"] for name in ("base", "lora-0")
    )
    assert plain != adapted
    generated = {"inputs": "Tell me.", "parameters": {"max_new_tokens": 12}}
    found = post(server, "/generate", generated)["generated_text"]
    generated["parameters"]["adapter_id"] = "lora-0"  # type: ignore[index]
    assert post(server, "/generate", generated)["generated_text"] != found
    ollama = {"messages": ASK["messages"], "stream": False, "options": {"temperature": 0, "num_predict": 12}}
    said = [
        post(server, "/api/chat", {**ollama, "model": name})["message"]["content"]
        for name in ("base", "lora-0", "lora-0:latest")
    ]
    assert said[0] != said[1] == said[2]
    message = {"messages": ASK["messages"], "max_tokens": 12, "temperature": 0}
    told = [post(server, "/v1/messages", {**message, "model": name}) for name in ("base", "lora-0")]
    assert told[0]["content"] != told[1]["content"] and told[1]["model"] == "lora-0"
    response = {"input": "Tell me.", "max_output_tokens": 16, "temperature": 0}
    output = [post(server, "/v1/responses", {**response, "model": name})["output"] for name in ("base", "lora-0")]
    assert output[0][0]["content"][0]["text"] != output[1][0]["content"][0]["text"]


def test_adapters_by_id_are_summed_with_their_scales(server: RunningServer) -> None:
    listed = get(server, "/lora-adapters")
    assert [(one["id"], one["name"], one["scale"]) for one in listed] == [(0, "lora-0", 0.0), (1, "lora-1", 0.0)]
    assert ask(server, lora=[{"id": 0, "scale": 1.0}]) == ask(server, "lora-0")
    assert ask(server, lora=[]) == ask(server) == ask(server, lora=[{"id": 1, "scale": 0}])
    both = [{"id": 0, "scale": 0.5}, {"id": 1, "scale": -2.0}]
    answer = post(server, "/v1/chat/completions", {**ASK, "lora": both, "include_applied": True})
    applied = {one["kind"]: one["value"] for one in answer["penstock"]["applied"]}
    assert applied["lora"] == [{"name": "lora-0", "scale": 0.5}, {"name": "lora-1", "scale": -2.0}]
    summed = answer["choices"][0]["message"]["content"]
    assert summed not in (ask(server), ask(server, "lora-0"), ask(server, "lora-1"))
    plain = ask(server)
    post(server, "/lora-adapters", both)
    try:
        assert ask(server) == summed and ask(server, lora=[]) == plain and ask(server, "lora-1") != summed
    finally:
        post(server, "/lora-adapters", [])
    assert ask(server) == plain


def test_bad_requests_say_why(server: RunningServer, lab: Lab, tmp_path: Path) -> None:
    def refuse(path: str, body: Any, *said: str, status: int = 400) -> None:
        found = post(server, path, body, status)
        text = found["error"]["message"] if isinstance(found["error"], dict) else found["error"]
        assert all(one in text for one in said), text

    chat = "/v1/chat/completions"
    refuse(chat, {**ASK, "lora": [{"id": 99, "scale": 1}]}, "no adapter of id 99", "/lora-adapters")
    refuse(chat, {**ASK, "model": "lora-0", "lora": [{"id": 1, "scale": 1}]}, "'lora-0'", "one of them")
    refuse(chat, {**ASK, "lora": [{"id": 0, "scale": 1e9}]}, "lora.0.scale", "1000")
    refuse(chat, {**ASK, "lora_path": "/x"}, "'/x' does not exist", "lora-1", status=404)
    refuse(chat, {**ASK, "model": "lora-9"}, "'lora-9' does not exist", "lora-1", status=404)
    refuse("/generate", {"inputs": "x", "parameters": {"adapter_id": "lora-9"}}, "'lora-9'", "lora-0", status=422)
    refuse("/lora-adapters", {"id": 0}, "send a list")
    refuse("/lora-adapters", [{"id": 5, "scale": 1}], "id 5")
    name, path = "/v1/load_lora_adapter", str(lab.folders[2])
    refuse(name, {"lora_name": "new", "lora_path": str(tmp_path / "none")}, "no adapter found", status=404)
    refuse(name, {"lora_name": "new", "lora_path": str(tmp_path)}, "adapter_config.json", status=404)
    refuse(name, {"lora_name": "new", "lora_path": str(tmp_path / "none.gguf")}, "GGUF", status=404)
    (tmp_path / "adapter_config.json").write_text("this is not json")
    refuse(name, {"lora_name": "new", "lora_path": str(tmp_path)}, "adapter_config.json")
    config = json.loads((lab.folders[2] / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "trainable_token_indices": [1]}))
    refuse(name, {"lora_name": "new", "lora_path": str(tmp_path)}, "trainable_token_indices", "penstock merge")
    refuse(name, {"lora_name": "lora-0", "lora_path": path}, "already loaded", "load_inplace")
    refuse(name, {"lora_name": "base", "lora_path": path}, "another model")
    refuse(name, {"lora_path": path}, "lora_name")
    refuse("/v1/unload_lora_adapter", {"lora_name": "new"}, "no adapter 'new'", status=404)
    assert ask(server, "lora-0") != ask(server)


def test_loading_in_place_replaces_an_adapter_for_later_requests(server: RunningServer, lab: Lab) -> None:
    load(server, "mine", lab.folders[0])
    first = ask(server, "mine")
    assert first == ask(server, "lora-0")
    load(server, "mine", lab.folders[1], load_inplace=True)
    assert ask(server, "mine") == ask(server, "lora-1") != first
    unload(server, "mine")
    assert "does not exist" in post(server, "/v1/chat/completions", {**ASK, "model": "mine"}, 404)["error"]["message"]


def chats(count: int, names: list[str], max_tokens: int = 400) -> list[dict[str, Any]]:
    return [
        {
            "model": names[index % len(names)],
            "messages": [{"role": "user", "content": f"Say {index}."}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            **({"temperature": 0} if index % 2 else {"temperature": 0.9, "seed": index}),
        }
        for index in range(count)
    ]


def results(said: list[Said]) -> list[tuple[str | None, list[int]]]:
    assert all(one.error is None for one in said), [one.error for one in said]
    return [(one.finish_reason, one.token_ids) for one in said]


def disturb(server: RunningServer, lab: Lab, num_streams: int, num_rounds: int) -> None:
    """Load and unload adapters, one of them in use, and kill the engine, while streams run."""
    load(server, "leaving", lab.folders[4])
    names = ["base", "lora-0", "lora-1", "leaving"]
    bodies = chats(num_streams, names)
    undisturbed = results(asyncio.run(run_all(server.url, bodies)))
    unloaded: list[int] = []
    pid, num_lines = server.engine_pid(), len(server.log)

    async def beside(counts: list[int]) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            async def call(route: str, name: str, **more: str) -> None:
                response = await client.post(f"/v1/{route}_lora_adapter", json={"lora_name": name, **more})
                assert response.status_code == 200, response.text

            async def leave() -> None:
                await call("unload", "leaving")
                unloaded.extend(counts)

            while not all(counts[3::4]):
                await asyncio.sleep(0.01)
            leaving = asyncio.ensure_future(leave())
            while (await client.get("/v1/models/leaving")).status_code == 200:
                await asyncio.sleep(0.01)
            for number in range(num_rounds):
                if number % 8 == 0:  # what was not unloaded yet is told to the next engine
                    os.kill(pid if number == 0 else server.engine_pid(), signal.SIGKILL)
                await call("load", f"new-{number}", lora_path=str(lab.folders[2 + number % 2]))
                await call("unload", f"new-{number}")
            await leaving

    said = asyncio.run(run_all(server.url, bodies, beside))
    assert results(said) == undisturbed
    assert all(count >= one.num_chunks - 2 for count, one in zip(unloaded[3::4], said[3::4])), "unloaded while in use"
    crashes = [line for line in server.log[num_lines:] if "restarting" in line]
    assert crashes and " 0 requests continue" not in crashes[0]


def test_streams_are_intact_while_adapters_come_and_go_and_the_engine_dies(server: RunningServer, lab: Lab) -> None:
    disturb(server, lab, 12, 4)
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'penstock:lora_requests_info{max_lora="2"' in metrics


@pytest.mark.slow
def test_64_streams_are_intact(server: RunningServer, lab: Lab) -> None:
    disturb(server, lab, 64, 24)
