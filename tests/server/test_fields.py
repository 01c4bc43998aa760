"""Every parameter of OpenAI's own types: honoured, refused with a reason, or without effect."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params

from penstock.server.openai.chat_body import REFUSED, ChatBody
from penstock.server.openai.completions import CompletionBody
from penstock.server.openai.embeddings import EmbeddingBody
from tests.server.running import RunningServer

HI: Any = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

# parameter: a value, and what of the answer must hold; None: accepted without effect
HONOURED: dict[str, tuple[Any, Any]] = {
    "messages": (HI, lambda a: "Paris" in a["choices"][0]["message"]["content"]),
    "model": ("smollm2", lambda a: a["model"] == "smollm2"),
    "frequency_penalty": (2.0, lambda a: a["choices"]),  # compared below
    "presence_penalty": (2.0, lambda a: a["choices"]),  # compared below
    "logit_bias": ({"504": -100}, lambda a: not a["choices"][0]["message"]["content"].startswith("The")),
    "logprobs": (True, lambda a: a["choices"][0]["logprobs"]["content"][0]["token"] == "The"),
    "max_completion_tokens": (3, lambda a: a["usage"]["completion_tokens"] == 3),
    "max_tokens": (2, lambda a: a["usage"]["completion_tokens"] == 2),
    "n": (2, lambda a: len(a["choices"]) == 2),
    "reasoning_effort": ("low", lambda a: a["choices"]),
    "response_format": (
        {"type": "json_object"},
        lambda a: (
            json.loads(a["choices"][0]["message"]["content"]) is not None
            or a["choices"][0]["finish_reason"] == "length"
        ),
    ),
    "seed": (5, lambda a: a["choices"]),  # two more below
    "stop": (" Paris", lambda a: a["choices"][0]["message"]["content"] == "The capital of France is"),
    "temperature": (0.0, lambda a: a["choices"][0]["message"]["content"] == "The capital of France is Paris."),
    "prediction": (
        {"type": "content", "content": "The capital of France is Paris."},
        lambda a: a["usage"]["completion_tokens_details"].keys() >= {"accepted_prediction_tokens"},
    ),
    "tool_choice": ("none", lambda a: "tool_calls" not in a["choices"][0]["message"]),
    "tools": ([TOOL], lambda a: a["usage"]["prompt_tokens"] > 60),
    "parallel_tool_calls": (False, lambda a: len(a["choices"][0]["message"]["tool_calls"]) == 1),
    "top_p": (0.01, lambda a: a["choices"][0]["message"]["content"].startswith("The capital")),
    "top_logprobs": (2, lambda a: len(a["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2),
    "stream_options": ({"include_usage": True}, None),
}
WITHOUT_EFFECT: dict[str, Any] = {
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "prompt_cache_key": "k",
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "service_tier": "auto",
    "store": False,
    "user": "u",
    "verbosity": "low",
}
COUNT: Any = [{"role": "user", "content": "Repeat the word yes: yes yes yes yes yes yes yes"}]
ALONGSIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "parallel_tool_calls": {"tools": [TOOL], "tool_choice": "required"},
    "frequency_penalty": {"messages": COUNT, "ignore_eos": True},
    "presence_penalty": {"messages": COUNT, "ignore_eos": True},
    "seed": {"temperature": 1.5},
}


def _text(answer: Any) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def names(kind: Any) -> list[str]:
    return sorted(kind.__annotations__)


def test_every_chat_parameter_has_its_case() -> None:
    known = {*HONOURED, *WITHOUT_EFFECT, *REFUSED}
    assert set(names(chat_create_params.CompletionCreateParamsBase)) <= known
    assert known <= set(ChatBody.model_fields)


@pytest.mark.parametrize("name", sorted(HONOURED))
def test_honoured(server: RunningServer, name: str) -> None:
    value, holds = HONOURED[name]
    body = {"messages": HI, "temperature": 0, "max_tokens": 24, **ALONGSIDE.get(name, {}), name: value}
    if name == "max_completion_tokens":
        del body["max_tokens"]
    if name in ("response_format",):
        body["max_tokens"] = 60
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    if holds is not None:
        assert holds(answer.json()), answer.text
    if name.endswith("_penalty"):
        plain = httpx.post(f"{server.url}/v1/chat/completions", json={**body, name: 0}, timeout=240).json()
        assert _text(answer.json()) != _text(plain)
    if name == "seed":
        again, other = (
            httpx.post(f"{server.url}/v1/chat/completions", json={**body, "seed": seed}, timeout=240).json()
            for seed in (5, 6)
        )
        assert _text(again) == _text(answer.json()) != _text(other)
    if holds is None:
        assert '"prompt_tokens":37' in answer.text


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_without_effect(server: RunningServer, name: str) -> None:
    body = {"messages": HI, "temperature": 0, "max_tokens": 24, name: WITHOUT_EFFECT[name]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "The capital of France is Paris."


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused(server: RunningServer, name: str) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": HI, name: {"a": 1}})
    assert answer.status_code == 400 and name in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "kind, body",
    [
        (completion_create_params.CompletionCreateParamsBase, CompletionBody),
        (embedding_create_params.EmbeddingCreateParams, EmbeddingBody),
    ],
)
def test_other_routes_know_every_parameter(kind: Any, body: Any) -> None:
    assert set(names(kind)) <= set(body.model_fields)


VLLM: dict[str, Any] = {
    "top_k": 1,
    "min_p": 0.9,
    "repetition_penalty": 1.1,
    "min_tokens": 20,
    "ignore_eos": True,
    "stop_token_ids": [504],
    "allowed_token_ids": [504, 3575],
    "bad_words": ["The"],
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 10,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template_kwargs": {"x": 1},
    "priority": 1,
    "cache_salt": "s",
    "return_token_ids": True,
    "structured_outputs": {"choice": ["yes", "no"]},
    "guided_choice": ["yes", "no"],
    "guided_regex": "[0-9]{3}",
    "guided_json": {"type": "integer"},
    "guided_grammar": 'start: "a" | "b"',
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "timeout": 60,
}
SHOWS: dict[str, Any] = {
    "min_p": lambda t: t.startswith("The capital"),
    "top_k": lambda t: t.startswith("The capital"),
    "structured_outputs": lambda t: t in ("yes", "no"),
    "guided_choice": lambda t: t in ("yes", "no"),
    "guided_regex": lambda t: t.isdigit() and len(t) == 3,
    "guided_json": lambda t: isinstance(json.loads(t), int),
    "guided_grammar": lambda t: t in ("a", "b"),
    "bad_words": lambda t: not t.startswith("The"),
    "stop_token_ids": lambda t: "The" not in t,
    "ignore_eos": lambda t: len(t) > 40,
    "repetition_penalty": lambda t: t.startswith("The capital"),
    "min_tokens": lambda t: len(t) > 60,
    "include_stop_str_in_output": lambda t: t.endswith("France"),
}
WITH: dict[str, dict[str, Any]] = {"include_stop_str_in_output": {"stop": ["France"]}}


@pytest.mark.parametrize("name", sorted(VLLM))
def test_vllm_extras(server: RunningServer, name: str) -> None:
    body = {
        "messages": HI,
        "temperature": 1.0 if name in ("top_k", "min_p") else 0,
        "max_tokens": 24,
        "seed": 1,
        **WITH.get(name, {}),
        name: VLLM[name],
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["message"]["content"]
    assert SHOWS.get(name, lambda t: t)(text), text
    if name == "allowed_token_ids":
        allowed = httpx.post(f"{server.url}/detokenize", json={"tokens": VLLM[name]}).json()["prompt"].split()
        assert not text.replace(allowed[0], "").replace(allowed[-1], "").strip(), text
    if name == "return_token_ids":
        assert answer.json()["choices"][0]["token_ids"][:2] == [504, 3575]
        assert len(answer.json()["prompt_token_ids"]) == 37
    if name == "prompt_logprobs":
        assert len(answer.json()["prompt_logprobs"]) == 37
    if name == "truncate_prompt_tokens":
        assert answer.json()["usage"]["prompt_tokens"] == 10


def test_invalid_structures_are_400(server: RunningServer) -> None:
    structures: list[dict[str, Any]] = [
        {"regex": "(["},
        {"json": {"type": "nonsense"}},
        {"grammar": "start: nothing"},
        {"choice": []},
        {"choice": ["an answer that no budget of eight tokens has room for, however it is cut"]},
    ]
    for structure in structures:
        answer = httpx.post(
            f"{server.url}/v1/chat/completions",
            timeout=240,
            json={"messages": HI, "max_tokens": 8, "structured_outputs": structure},
        )
        assert answer.status_code == 400, (structure, answer.text)
