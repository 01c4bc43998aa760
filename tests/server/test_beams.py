"""Beam search over HTTP gives what `LLM.beam_search` gives."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from penstock import LLM, BeamSearchParams
from tests.server.running import RunningServer

PROMPTS = ["The capital of France is", "Once upon"]


def ask(server: RunningServer, **values: Any) -> httpx.Response:
    body = {"prompt": PROMPTS, "use_beam_search": True, "n": 3, "max_tokens": 6, "temperature": 0, **values}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def test_beams(server: RunningServer) -> None:
    with LLM("smollm2", progress=False) as llm:
        expected = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=6))
    told = ask(server).json()
    texts = [choice["text"] for choice in told["choices"]]
    wanted = [one.text for output in expected for one in output.sequences]
    assert [choice["index"] for choice in told["choices"]] == list(range(6))
    assert [PROMPTS[at // 3] + text for at, text in enumerate(texts)] == wanted
    assert told["usage"]["completion_tokens"] == 36
    chat = {"messages": [{"role": "user", "content": "hi"}], "use_beam_search": True, "n": 2, "max_tokens": 5}
    said = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).json()
    assert len({choice["message"]["content"] for choice in said["choices"]}) == 2
    streamed = ask(server, stream=True).text
    assert streamed.count('"finish_reason":"length"') == 6 and streamed.rstrip().endswith("[DONE]")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"temperature": 0.5}, "temperature=0.5 does not go with use_beam_search"),
        ({"n": 33}, "n=33 beams are over the limit of 32"),
        ({"logprobs": 2}, "logprobs=2 does not go with"),
        ({"response_format": {"type": "json_object"}}, "a form of the answer does not go with"),
        ({"stop": "x"}, "does not go with use_beam_search"),
        ({"length_penalty": 11}, "length_penalty"),
    ],
    ids=str,
)
def test_what_beams_do_not_go_with(server: RunningServer, values: dict[str, Any], why: str) -> None:
    answer = ask(server, **values)
    assert answer.status_code == 400 and why in answer.json()["error"]["message"]
