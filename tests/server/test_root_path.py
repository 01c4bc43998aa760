"""Options of `vllm serve` for proxies and clients: a root path, usage in every chunk, tokens by ids."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.server.running import RunningServer

FLAGS = ("--root-path", "/llm", "--enable-force-include-usage", "--return-tokens-as-token-ids", "--api-key", "key")
HEADERS = {"Authorization": "Bearer key"}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "logprobs": True}


@pytest.fixture(scope="module")
def proxied() -> Iterator[RunningServer]:
    with RunningServer("smollm2", *FLAGS) as server:
        yield server


@pytest.mark.parametrize("root", ["", "/llm"])
def test_with_and_without_the_root_path(proxied: RunningServer, root: str) -> None:
    url = f"{proxied.url}{root}"
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/v1/models", headers=HEADERS).json()["data"]
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/", headers={"Accept": "text/html"}).text.startswith("<!doctype html>")
    assert httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers=HEADERS, timeout=60).status_code == 200


def test_only_whole_parts_of_a_path_are_stripped(proxied: RunningServer) -> None:
    for path in ("/llmv1/models", "/llm/llm/v1/models", "/x/llm/v1/models"):
        assert httpx.get(f"{proxied.url}{path}", headers=HEADERS).status_code == 404


def test_what_the_server_asks_of_every_request(proxied: RunningServer) -> None:
    asked = {**CHAT, "stream": True}
    text = httpx.post(f"{proxied.url}/v1/chat/completions", json=asked, headers=HEADERS, timeout=60).text
    *told, last = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    assert all(chunk["usage"]["prompt_tokens"] for chunk in told) and not last["choices"]
    tokens = [one["token"] for chunk in told for one in (chunk["choices"][0]["logprobs"] or {}).get("content", ())]
    assert tokens and all(token.startswith("token_id:") for token in tokens)
