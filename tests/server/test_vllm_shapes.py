"""Answers have what scripts written for vLLM's server read from them."""

from __future__ import annotations

import json
from typing import Any

import httpx

from penstock.server.openai.chat_body import Message
from tests.server.running import RunningServer

HI = [{"role": "user", "content": "What is 1+1?"}]


def post(server: RunningServer, path: str, **values: Any) -> Any:
    answer = httpx.post(f"{server.url}/v1/{path}", json={"max_tokens": 3, "temperature": 0, **values}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(server: RunningServer, path: str, **values: Any) -> list[Any]:
    text = httpx.post(
        f"{server.url}/v1/{path}", timeout=60, json={"max_tokens": 3, "temperature": 0, "stream": True, **values}
    ).text
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]


def test_what_was_not_asked_for_is_null(server: RunningServer) -> None:
    chat = post(server, "chat/completions", messages=HI)
    choice = chat["choices"][0]
    assert [chat["prompt_logprobs"], chat["prompt_token_ids"], choice["token_ids"], choice["message"]["reasoning"]] == [
        None
    ] * 4
    choice = post(server, "completions", prompt="Hello")["choices"][0]
    assert [choice["prompt_logprobs"], choice["prompt_token_ids"], choice["token_ids"]] == [None] * 3


def test_a_cut_prompt_is_told_as_the_model_read_it(server: RunningServer) -> None:
    ids = list(range(300, 308))
    cut = {"truncate_prompt_tokens": 4, "return_token_ids": True}
    answer = post(server, "completions", prompt=ids, **cut)
    assert answer["choices"][0]["prompt_token_ids"] == ids[-4:] and answer["usage"]["prompt_tokens"] == 4
    echoed = post(
        server, "completions", prompt="one two three four five six", echo=True, logprobs=1, truncate_prompt_tokens=2
    )
    assert echoed["choices"][0]["text"].startswith(" five six")
    assert echoed["choices"][0]["logprobs"]["tokens"][:2] == [" five", " six"]
    assert len(post(server, "chat/completions", messages=HI, **cut)["prompt_token_ids"]) == 4


def test_streams_tell_the_prompt_once(server: RunningServer) -> None:
    told = chunks(server, "chat/completions", messages=HI, return_token_ids=True, n=2, temperature=1)
    whole = post(server, "chat/completions", messages=HI, return_token_ids=True)
    assert told[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all(chunk["prompt_token_ids"] is None for chunk in told[1:])


def test_usage_goes_on_only_where_usage_is_asked_for(server: RunningServer) -> None:
    for path, asked in (("chat/completions", {"messages": HI}), ("completions", {"prompt": "Hello"})):
        only = {"continuous_usage_stats": True}
        assert not any(chunk.get("usage") for chunk in chunks(server, path, **asked, stream_options=only))
        both = {"include_usage": True, "continuous_usage_stats": True}
        assert all(chunk["usage"] for chunk in chunks(server, path, **asked, stream_options=both))


def test_log_probabilities_of_the_chosen_token_alone(server: RunningServer) -> None:
    logprobs = post(server, "completions", prompt="Hello", logprobs=0)["choices"][0]["logprobs"]
    assert [list(top.values()) for top in logprobs["top_logprobs"]] == [[one] for one in logprobs["token_logprobs"]]


def test_echo_and_prompt_logprobs_together(server: RunningServer) -> None:
    choice = post(server, "completions", prompt="Hello there", echo=True, logprobs=1, prompt_logprobs=2)["choices"][0]
    assert choice["prompt_logprobs"][0] is None and 2 <= len(choice["prompt_logprobs"][1]) <= 3
    assert len(choice["logprobs"]["top_logprobs"][1]) == 1


def test_reasoning_comes_back_under_vllms_name() -> None:
    said = Message.model_validate({"role": "assistant", "content": "2", "reasoning": "One and one."})
    assert said.to_template()["reasoning_content"] == "One and one."
    both = Message.model_validate({"role": "assistant", "content": "2", "reasoning": "a", "reasoning_content": "b"})
    assert both.to_template()["reasoning_content"] == "b"


def test_more_tokens_than_fit_are_not_refused(server: RunningServer) -> None:
    answer = httpx.post(
        f"{server.url}/v1/completions",
        timeout=60,
        json={"prompt": "One two", "max_tokens": 100_000, "temperature": 0, "stop": [" "]},
    )
    assert answer.status_code == 200 and "max_tokens=100000" in answer.headers["warning"]
    assert "warning" not in httpx.post(f"{server.url}/v1/completions", json={"prompt": "One", "max_tokens": 2}).headers
