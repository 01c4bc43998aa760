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


def test_either_side_of_a_prompt_is_cut(server: RunningServer) -> None:
    ids = list(range(300, 308))
    cut = {"truncate_prompt_tokens": 4, "return_token_ids": True, "truncation_side": "right"}
    assert post(server, "completions", prompt=ids, **cut)["choices"][0]["prompt_token_ids"] == ids[:4]


def test_special_tokens_are_echoed(server: RunningServer) -> None:
    choice = post(server, "completions", prompt=[0, 0, 300], echo=True, logprobs=1)["choices"][0]
    assert choice["text"].startswith("<|endoftext|><|endoftext|>")
    assert len(choice["logprobs"]["tokens"]) == 6


def test_usage_of_each_chunk_is_over_that_of_the_one_before(server: RunningServer) -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"messages": HI, "max_tokens": 10, "min_tokens": 10, "stream_options": both}
    *told, last = [chunk["usage"]["completion_tokens"] for chunk in chunks(server, "chat/completions", **asked)]
    assert told == sorted(set(told)) and told[0] == 0 and last == told[-1] == 10


def test_tokens_by_their_ids(server: RunningServer) -> None:
    asked = {"logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = post(server, "completions", prompt="Hello", **asked)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in choice["token_ids"]]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
    asked = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    content = post(server, "chat/completions", messages=HI, **asked)["choices"][0]["logprobs"]["content"]
    assert all(entry["token"].startswith("token_id:") for one in content for entry in (one, *one["top_logprobs"]))


def test_log_probabilities_of_named_tokens(server: RunningServer) -> None:
    asked = {"prompt": "Hello", "logprobs": 5, "logprob_token_ids": [5000], "return_tokens_as_token_ids": True}
    logprobs = post(server, "completions", **asked, allowed_token_ids=[42])["choices"][0]["logprobs"]
    assert set(logprobs["top_logprobs"][0]) == {"token_id:42", "token_id:5000"}
    asked = {"messages": HI, "logprobs": True, "logprob_token_ids": [5000, 6000], "return_tokens_as_token_ids": True}
    content = post(server, "chat/completions", **asked)["choices"][0]["logprobs"]["content"]
    assert all({"token_id:5000", "token_id:6000"} <= {one["token"] for one in top["top_logprobs"]} for top in content)


def test_any_role_is_the_templates_business(server: RunningServer) -> None:
    said = post(server, "chat/completions", messages=[{"role": "pirate", "content": "Ahoy"}], return_token_ids=True)
    ids = {"tokens": said["prompt_token_ids"]}
    assert "pirate" in httpx.post(f"{server.url}/detokenize", json=ids, timeout=60).json()["prompt"]


def test_invocations(server: RunningServer) -> None:
    """SageMaker's one route answers as the route that the fields belong to."""
    for path, fields in (("chat/completions", {"messages": HI}), ("completions", {"prompt": "Hello"})):
        asked = {**fields, "max_tokens": 3, "temperature": 0}
        told = httpx.post(f"{server.url}/invocations", json=asked, timeout=60).json()
        assert told["choices"] == post(server, path, **fields)["choices"]
    for body in (b"{}", b"[1]", b"\xff", b"x" * 70_000):
        answer = httpx.post(f"{server.url}/invocations", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and "send an object with one of them" in answer.text
    for method in ("GET", "POST"):
        assert httpx.request(method, f"{server.url}/ping").status_code == 200


def test_streams_tell_the_prompt_once(server: RunningServer) -> None:
    told = chunks(server, "chat/completions", messages=HI, return_token_ids=True, n=2, temperature=1)
    whole = post(server, "chat/completions", messages=HI, return_token_ids=True)
    assert told[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in told[1:])


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
    tops = choice["logprobs"]["top_logprobs"]
    assert next(iter(tops[1])) == choice["logprobs"]["tokens"][1]  # the prompt's token, and the likeliest
    assert all(1 <= len(top) <= 2 for top in tops[1:])


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
