"""Ollama's API on a running server."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.server.running import RunningServer

ASK = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "num_predict": 16}
ANSWER = "The capital of France is Paris."
FIGURES = {
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=240)


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_chat_streams_lines(server: RunningServer) -> None:
    said = lines(post(server, "/api/chat", model="smollm2:latest", messages=ASK, options=GREEDY))
    assert "".join(line["message"]["content"] for line in said) == ANSWER
    assert [line["done"] for line in said] == [False] * (len(said) - 1) + [True]
    assert all(line["model"] == "smollm2:latest" and line["message"]["role"] == "assistant" for line in said)
    last = said[-1]
    assert last["done_reason"] == "stop" and last["eval_count"] == 8 and last["prompt_eval_count"] == 37
    assert all(isinstance(last[name], int) and last[name] > 0 for name in FIGURES)
    assert last["total_duration"] >= last["eval_duration"] + last["prompt_eval_duration"]


def test_whole_chat_says_the_same(server: RunningServer) -> None:
    answer = post(server, "/api/chat", messages=ASK, options=GREEDY, stream=False, logprobs=True).json()
    assert answer["message"] == {"role": "assistant", "content": ANSWER} and answer["done"] is True
    assert answer.keys() >= FIGURES and len(answer["logprobs"]) == 8


def test_generate(server: RunningServer) -> None:
    whole = post(server, "/api/generate", prompt=ASK[0]["content"], options=GREEDY, stream=False).json()
    assert whole["response"] == ANSWER
    streamed = lines(post(server, "/api/generate", prompt=ASK[0]["content"], options=GREEDY))
    assert "".join(line["response"] for line in streamed) == ANSWER
    raw = post(
        server,
        "/api/generate",
        prompt="The capital of France is",
        raw=True,
        stream=False,
        options={"temperature": 0, "num_predict": 2},
    ).json()
    assert raw["response"] == " Paris." and raw["prompt_eval_count"] == 5 and raw["done_reason"] == "length"


def test_format(server: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    answer = post(
        server,
        "/api/chat",
        messages=[{"role": "user", "content": "How old is Ann?"}],
        format=schema,
        options={"temperature": 0, "num_predict": 24},
        stream=False,
    ).json()
    assert isinstance(json.loads(answer["message"]["content"])["age"], int)


def test_an_answer_may_ask_for_more_than_fits(server: RunningServer) -> None:
    answer = post(server, "/api/chat", messages=ASK, options={"temperature": 0, "num_predict": 10**6}, stream=False)
    assert answer.json()["message"]["content"] == ANSWER


def test_loading_only(server: RunningServer) -> None:
    assert post(server, "/api/chat", model="smollm2").json()["done_reason"] == "load"
    assert post(server, "/api/generate", model="smollm2").json()["response"] == ""


def test_what_there_is(server: RunningServer) -> None:
    [tag] = httpx.get(server.url + "/api/tags").json()["models"]
    assert tag["name"] == "smollm2" and tag["size"] > 90e6 and tag["details"]["family"] == "llama"
    [loaded] = httpx.get(server.url + "/api/ps").json()["models"]
    assert loaded["digest"] == tag["digest"] and loaded["context_length"] == 2048
    shown = post(server, "/api/show", model="smollm2").json()
    assert shown["capabilities"][0] == "completion" and "im_start" in shown["template"]
    assert shown["model_info"]["llama.context_length"] == 2048
    assert httpx.get(server.url + "/api/version").json()["version"]
    assert httpx.head(server.url + "/").status_code == 200
    paths = httpx.get(server.url + "/openapi.json").json()["paths"]
    assert "delete" in paths["/api/delete"] and "post" in paths["/generate_stream"]


def test_refusals_are_ollamas(server: RunningServer) -> None:
    refused: list[tuple[int, str, dict[str, Any]]] = [
        (400, "/api/chat", {"messages": ASK, "options": {"num_predct": 1}}),
        (404, "/api/chat", {"model": "nobody", "messages": ASK}),
        (400, "/api/chat", {"messages": ASK, "think": True}),
        (400, "/api/generate", {"prompt": "x", "suffix": "y"}),
        (400, "/api/embed", {"input": "x"}),
        (400, "/api/pull", {"model": "/etc"}),
        (400, "/api/pull", {}),
        (404, "/api/pull", {"model": "no such model"}),
        (404, "/api/nothing", {}),
    ]
    for status, path, body in refused:
        answer = post(server, path, **body)
        assert answer.status_code == status and list(answer.json()) == ["error"], answer.text
        assert isinstance(answer.json()["error"], str)
    default = httpx.request("DELETE", server.url + "/api/delete", json={"model": "smollm2"})
    assert default.status_code == 409 and "default" in default.json()["error"]
