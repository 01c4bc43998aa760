"""A server without a tokenizer: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.server.running import RunningServer

IDS = [504, 3575, 282, 4649, 314]


@pytest.fixture(scope="module")
def bare() -> Iterator[RunningServer]:
    with RunningServer("smollm2", "--skip-tokenizer-init") as server:
        yield server


def test_ids_alone(bare: RunningServer, server: RunningServer) -> None:
    asked = {"prompt": IDS, "max_tokens": 5, "temperature": 0, "return_token_ids": True, "logprobs": 1}
    with_text, without = (
        httpx.post(f"{one.url}/v1/completions", json=asked, timeout=60).json()["choices"][0] for one in (server, bare)
    )
    assert without["token_ids"] == with_text["token_ids"] and without["text"] == ""
    assert without["logprobs"]["tokens"] == [f"token_id:{id}" for id in without["token_ids"]]
    assert without["logprobs"]["token_logprobs"] == with_text["logprobs"]["token_logprobs"]
    assert httpx.get(f"{bare.url}/info").json()["models"][0]["path"] is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": IDS, "stop": "x"}),
        ("/v1/completions", {"prompt": IDS, "structured_outputs": {"regex": "a"}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/api/generate", {"prompt": "x"}),
        ("/generate", {"inputs": "x"}),
    ],
    ids=str,
)
def test_texts_are_refused(bare: RunningServer, path: str, body: dict[str, object]) -> None:
    answer = httpx.post(f"{bare.url}{path}", json=body, timeout=60)
    assert answer.status_code in (400, 422) and ("tokenizer" in answer.text or "chat template" in answer.text)
