"""Log probabilities by the hundred thousand: limited by the body, and put into their form off the event loop."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from penstock.errors import InvalidRequest
from penstock.server.openai.logprobs import MAX_PROMPT_LOGPROBS, check_prompt_logprobs, encode_piecewise
from penstock.types import SamplingParams
from tests.hardening.counted import CountedServer

IDS = [[5 + at % 7 for at in range(780)]] * 8
MESSAGES = [{"role": "user", "content": "a"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "prompts": ("/v1/completions", {"prompt": IDS, "max_tokens": 1, "prompt_logprobs": 20}),
    "echo": ("/v1/completions", {"prompt": IDS, "max_tokens": 1, "logprobs": 20, "echo": True}),
    "tgi": (
        "/generate",
        {
            "inputs": "the cat " * 400,
            "parameters": {"max_new_tokens": 600, "decoder_input_details": True, "details": True, "top_n_tokens": 5},
        },
    ),
    "answers": ("/v1/completions", {"prompt": "a", "max_tokens": 100, "logprobs": 20, "n": 32, "ignore_eos": True}),
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 100, "n": 63, "logprobs": True, "top_logprobs": 20, "ignore_eos": True},
    ),
    "chat prompt": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "the cat " * 400}], "max_tokens": 1, "prompt_logprobs": 20},
    ),
    "responses": ("/v1/responses", {"input": "a", "max_output_tokens": 1000, "top_logprobs": 20}),
}


def streams(path: str, streamed: bool) -> dict[str, Any]:
    return {} if path.startswith("/generate") else {"stream": streamed}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_many_log_probabilities_hold_up_nobody(counted: CountedServer, name: str, streamed: bool) -> None:
    path, body = BODIES[name]
    if path == "/generate" and streamed:
        path, body = "/generate_stream", {**body, "parameters": {"max_new_tokens": 600, "top_n_tokens": 5}}
    small = {**body, **({"prompt": [IDS[0][:9]]} if isinstance(body.get("prompt"), list) else {})}
    small |= streams(path, streamed) | ({"n": 1} if "n" in body else {})
    httpx.post(counted.url + path, json=small, timeout=120)
    counted.forget()
    answer = httpx.post(counted.url + path, json={**body, **streams(path, streamed)}, timeout=120)
    assert answer.status_code == 200, answer.text[:300]
    counted.check_callbacks()
    if not streamed and path.endswith("completions"):
        assert len(answer.json()["choices"]) == body.get("n", len(body["prompt"]) if "prompt" in body else 1)


def test_a_large_answer_has_the_form_of_a_small_one(counted: CountedServer) -> None:
    """Built off the loop or on it, each prompt's log probabilities are the same, whole and streamed."""

    def ask(prompts: list[list[int]], **more: Any) -> httpx.Response:
        body = {"prompt": prompts, "max_tokens": 1, "logprobs": 3, "echo": True, "temperature": 0, **more}
        return httpx.post(f"{counted.url}/v1/completions", json=body, timeout=120)

    prompts = [[5 + (at * number) % 50 for at in range(300)] for number in range(1, 9)]
    large = {one["index"]: one["logprobs"] for one in ask(prompts).json()["choices"]}
    lines = [line[6:] for line in ask(prompts, stream=True).text.splitlines() if line.startswith("data: {")]
    streamed = {
        one["index"]: one["logprobs"]
        for line in lines
        for one in json.loads(line)["choices"]
        if len(one["logprobs"]["tokens"]) > 1
    }
    for number, prompt in enumerate(prompts):
        small = ask([prompt]).json()["choices"][0]["logprobs"]
        for other in (large[number], streamed[number]):
            assert other["tokens"][:300] == small["tokens"][:300]
            assert other["token_logprobs"][1:300] == pytest.approx(small["token_logprobs"][1:300], abs=1e-3)
            assert [len(top) for top in other["top_logprobs"][1:300]] == [
                len(top) for top in small["top_logprobs"][1:300]
            ]


@pytest.mark.parametrize(
    "more", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}, {"prompt_logprobs": 0, "n": 63}]
)
def test_too_many_are_refused_with_their_limit(counted: CountedServer, more: dict[str, Any]) -> None:
    answer = httpx.post(
        f"{counted.url}/v1/completions", json={"prompt": [[5] * 4000] * 16, "max_tokens": 1, **more}, timeout=120
    )
    error = answer.json()["error"]["message"]
    assert answer.status_code == 400 and str(MAX_PROMPT_LOGPROBS) in error
    assert str(16 * 4000 * (63 if "n" in more else 21)) in error and "fewer" in error


def test_the_limit_is_the_bodys() -> None:
    params = SamplingParams(prompt_logprobs=15)
    check_prompt_logprobs([(params, 4096), (params, 4096)])
    with pytest.raises(InvalidRequest, match=str(MAX_PROMPT_LOGPROBS)):
        check_prompt_logprobs([(params, 4096), (params, 4097)])
    check_prompt_logprobs([(SamplingParams(logprobs=20), 1 << 30)])


def test_json_in_parts_is_json() -> None:
    value = {"a": [{"b": {"c": [{"d\n": 1.5, "é": None, "f": [True, {}]}], 'k"': []}}], "g": [], "h": {"1": {2: 3}}}
    for levels in range(9):
        assert json.loads(encode_piecewise(value, levels)) == json.loads(encode_piecewise(value, 0))
