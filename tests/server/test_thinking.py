"""A server on a model that thinks: what must match begins behind its reasoning, budgets end that, and tools are as
strict as they say."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.llm import tiny
from tests.server.running import RunningServer

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if tools %}{{ tools | length }} tools: <tool_call>{% endif %}[assistant]"
    "{% if opens or thinking %}<think>\n{% elif enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
POINT = {
    "type": "object",
    "properties": {"x": {"enum": [3, 17, 20]}, "name": {"enum": ["a", "b"]}},
    "required": ["x", "name"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
OPEN = {"chat_template_kwargs": {"opens": True}}
HELLO = [{"role": "user", "content": "hello"}]


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": POINT, **more}}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = write_thinker(tmp_path_factory.mktemp("thinker"))
    with RunningServer(str(folder), "--load-format", "dummy", "--threads", "1", "--served-model-name", "m") as running:
        yield running


def write_thinker(folder: Path) -> Path:
    """The markers are tokens of their own, as Qwen's and DeepSeek's: added, not special."""
    tiny.write_config(folder, vocab_size=320, max_position_embeddings=4096)
    tiny.write_tokenizer(folder, TEMPLATE)
    made = json.loads((folder / "tokenizer.json").read_text())
    for id, text in enumerate(("<think>", "</think>", "<tool_call>", "</tool_call>"), len(made["model"]["vocab"])):
        made["added_tokens"].append(
            {
                "id": id,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": False,
            }
        )
    (folder / "tokenizer.json").write_text(json.dumps(made))
    return folder


def ask(server: RunningServer, **values: Any) -> dict[str, Any]:
    body = {"messages": HELLO, "max_tokens": 120, "seed": 3, "temperature": 1.0, **values}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def message(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][0]["message"]
    return found


def is_point(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"x", "name"} and type(value["x"]) is int and value["name"] in ("a", "b")


def test_reasoning_and_then_what_was_asked_for(thinker: RunningServer) -> None:
    for seed in range(3):
        answer = ask(thinker, response_format=FORMAT, seed=seed, **OPEN)
        said = message(answer)
        assert is_point(said["content"]) and len(said["reasoning_content"]) > 20
        assert said["reasoning"] == said["reasoning_content"]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert 20 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < 100
    assert is_point(message(ask(thinker, response_format=FORMAT))["content"])  # it may open the block itself


def test_thinking_that_is_switched_off(thinker: RunningServer) -> None:
    for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        said = message(ask(thinker, response_format=FORMAT, logit_bias={"300": 100}, **off))
        assert is_point(said["content"]) and "reasoning_content" not in said


def test_a_budget(thinker: RunningServer) -> None:
    for budget in (0, 9):
        answer = ask(thinker, thinking_token_budget=budget, n=2, ignore_eos=True, return_token_ids=True, **OPEN)
        newline = tiny.tokenizer().encode("\n").ids
        for choice in answer["choices"]:
            assert choice["token_ids"][budget : budget + 2] == [*newline, 301]
            assert choice["message"]["content"] and choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * (budget + 2)


def test_a_budget_of_anthropics(thinker: RunningServer) -> None:
    thinking = {"type": "enabled", "budget_tokens": 0}
    body = {"model": "m", "messages": HELLO, "max_tokens": 60, "temperature": 0, "thinking": thinking}
    response = httpx.post(f"{thinker.url}/v1/messages", json=body, timeout=60)
    kinds = [block["type"] for block in response.json()["content"]]
    assert kinds == ["text"] and "warning" not in response.headers
    assert response.json()["usage"]["output_tokens_details"] == {"thinking_tokens": 2}
    off = httpx.post(
        f"{thinker.url}/v1/chat/completions",
        timeout=60,
        json={"messages": HELLO, "max_tokens": 2, "thinking_token_budget": 4, "reasoning_effort": "none"},
    )
    assert "a budget of 4 tokens for thinking has no effect" in off.headers["warning"]


def test_a_budget_in_completions(thinker: RunningServer) -> None:
    for prompt in ("hello<think>", [*tiny.tokenizer().encode("hello").ids, 300]):
        answer = httpx.post(
            f"{thinker.url}/v1/completions",
            timeout=60,
            json={
                "model": "m",
                "prompt": prompt,
                "max_tokens": 60,
                "thinking_token_budget": 6,
                "response_format": FORMAT,
            },
        ).json()
        thought, _, said = answer["choices"][0]["text"].partition("</think>")
        assert thought.endswith("\n") and is_point(said)


def test_a_stream_outlives_its_engine(thinker: RunningServer) -> None:
    """Killed in the midst of the reasoning: the same tokens come, and the answer matches."""
    values: dict[str, Any] = {
        "response_format": FORMAT,
        "thinking_token_budget": 600,
        "max_tokens": 900,
        "return_token_ids": True,
        "seed": 5,
        "messages": HELLO,
        "temperature": 1.0,
        **OPEN,
    }
    whole = ask(thinker, **values)["choices"][0]["token_ids"]
    assert whole[601] == 301
    for _ in range(5):  # on a busy machine the engine may be done before this process reads what it made
        tokens: list[int] = []
        pid, killed_s = thinker.engine_pid(), 0.0
        with httpx.stream(
            "POST", f"{thinker.url}/v1/chat/completions", json={**values, "stream": True}, timeout=60
        ) as response:
            for line in response.iter_lines():
                for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                    tokens += choice.get("token_ids") or []
                    if not killed_s and len(tokens) > 20:
                        os.kill(pid, signal.SIGKILL)
                        killed_s = time.monotonic()
        assert tokens == whole
        if time.monotonic() - killed_s > 0.5:  # another engine was started
            return
        while httpx.get(f"{thinker.url}/info").json()["models"][0]["pid"] in (pid, None):
            time.sleep(0.05)
    pytest.fail("the engine was always done before it was killed")


def test_forced_calls_behind_reasoning(thinker: RunningServer) -> None:
    """What response_format asks of text does not matter to them."""
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "move"}}]},
    }
    said = message(
        ask(
            thinker,
            tools=[tool("stay"), tool("move")],
            tool_choice=choice,
            response_format=FORMAT,
            parallel_tool_calls=False,
            max_tokens=500,
            thinking_token_budget=20,
            **OPEN,
        )
    )
    assert said["reasoning_content"] and not said["content"] and len(said["tool_calls"]) == 1
    call = said["tool_calls"][0]["function"]
    assert is_point(call["arguments"]) and call["name"] == "move"


def test_a_call_that_the_model_begins_is_of_allowed_tools_and_strict(thinker: RunningServer) -> None:
    """A model that wants to call and knows nothing of the form: without a grammar no call comes of it."""
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "move"}}]},
    }
    values: dict[str, Any] = {
        "tools": [tool("stay"), tool("move", strict=True)],
        "logit_bias": {"302": 100},
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert "tool_calls" not in message(ask(thinker, **{**values, "tools": [tool("stay"), tool("move")]}))
    answer = ask(thinker, **values, tool_choice=allowed)
    call = message(answer)["tool_calls"][0]["function"]
    assert call["name"] == "move" and is_point(call["arguments"])
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    free = ask(thinker, **{**values, "logit_bias": {"302": -100}}, tool_choice=allowed, ignore_eos=True)
    assert free["choices"][0]["finish_reason"] == "length" and "forced_closing" not in free["choices"][0]
    assert free["usage"]["completion_tokens"] == 120 and "tool_calls" not in message(free)
    assert answer["usage"]["prompt_tokens"] == ask(thinker, **values)["usage"]["prompt_tokens"]


def test_json_or_a_call(thinker: RunningServer) -> None:
    values: dict[str, Any] = {
        "tools": [tool("move", strict=True)],
        "response_format": FORMAT,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert is_point(message(ask(thinker, **values, logit_bias={"302": -100}))["content"])
    said = message(ask(thinker, **values, logit_bias={"302": 100}, parallel_tool_calls=False))
    assert is_point(said["tool_calls"][0]["function"]["arguments"])


def test_responses_with_a_forced_tool_and_a_format(thinker: RunningServer) -> None:
    body = {
        "model": "m",
        "input": "hello",
        "max_output_tokens": 200,
        "tool_choice": "required",
        "tools": [{"type": "function", "name": "move", "parameters": POINT, "strict": True}],
        "text": {"format": {"type": "json_schema", "name": "point", "schema": POINT}},
    }
    answer = httpx.post(f"{thinker.url}/v1/responses", json=body, timeout=60).json()
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    assert calls and is_point(calls[0]["arguments"])


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "fly"}}]},
            },
            "'fly', which is not among the tools",
        ),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "at least 1"),
    ],
)
def test_refusals(thinker: RunningServer, choice: dict[str, Any], reason: str) -> None:
    response = httpx.post(
        f"{thinker.url}/v1/chat/completions",
        timeout=60,
        json={"messages": HELLO, "tools": [tool("move")], "tool_choice": choice},
    )
    assert response.status_code == 400 and reason in response.json()["error"]["message"]
