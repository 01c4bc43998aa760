"""Chat templates that requests bring, documents for templates, and warnings, as a server's client sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer

TEMPLATE = (
    "{% for doc in documents or [] %}[{{ doc.text }}]{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def trusting(tiny_model: Path) -> Iterator[RunningServer]:
    flags = (
        "--load-format",
        "dummy",
        "--trust-request-chat-template",
        "--served-model-name",
        "tiny",
        "--served-model-name",
        "alias",
    )
    with RunningServer(str(tiny_model), *flags) as running:
        yield running


def ask(server: RunningServer, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"messages": HI, "max_tokens": 1, "return_token_ids": True, **body})


def prompt_of(server: RunningServer, **body: Any) -> str:
    answer = ask(server, **body)
    assert answer.status_code == 200, answer.text
    ids = answer.json()["prompt_token_ids"]
    return str(httpx.post(f"{server.url}/detokenize", json={"tokens": ids}).json()["prompt"])


def test_a_template_of_the_request(trusting: RunningServer) -> None:
    assert prompt_of(trusting, chat_template=TEMPLATE) == "hi"
    assert prompt_of(trusting, chat_template=TEMPLATE, documents=["a", {"text": "b"}]) == "[a][b]hi"
    assert prompt_of(trusting) != "hi"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for", "chat_template cannot be read: "),
        ("{{ messages.nobody() }}", "the chat template of this request"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", ""),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("x" * (1 << 17) + "x", "the limit is 131072"),
    ],
)
def test_a_hostile_template_is_refused(trusting: RunningServer, template: str, told: str) -> None:
    answer = ask(trusting, chat_template=template)
    assert answer.status_code == 400 and told in answer.json()["error"]["message"], answer.text


def test_templates_are_taken_only_where_they_are_trusted(server: RunningServer) -> None:
    answer = ask(server, chat_template=TEMPLATE)
    assert answer.status_code == 400 and "--trust-request-chat-template" in answer.json()["error"]["message"]


def test_documents_that_nobody_reads(trusting: RunningServer) -> None:
    answer = ask(trusting, documents=["a"])
    assert answer.status_code == 200 and "documents were ignored" in answer.headers["warning"]
    assert "warning" not in ask(trusting, chat_template=TEMPLATE, documents=["a"]).headers


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_told(trusting: RunningServer, stream: bool) -> None:
    answer = ask(trusting, stream=stream, no_such_key=5)
    assert answer.status_code == 200
    assert answer.headers["warning"] == "299 penstock \"unknown fields were ignored: 'no_such_key'\""
    assert "unknown fields were ignored: 'no_such_key'" in "\n".join(trusting.log)


def test_llama_servers_fields(trusting: RunningServer) -> None:
    said = ask(
        trusting,
        grammar='root ::= "yes" | "no"',
        max_tokens=8,
        n_probs=2,
        samplers=["top_k"],
        top_k=4,
        cache_prompt=True,
        id_slot=1,
    )
    [choice] = said.json()["choices"]
    assert choice["message"]["content"] in ("yes", "no") and "warning" not in said.headers
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    form = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    for asked in ({"json_schema": form}, {"response_format": {"type": "json_object", "value": form}}):
        answer = ask(trusting, "/v1/completions", messages=None, prompt="hi", n_predict=40, max_tokens=None, **asked)
        assert json.loads(answer.json()["choices"][0]["text"])["a"] in (1, 2)


def test_a_template_is_not_counted_with(trusting: RunningServer) -> None:
    answer = httpx.post(f"{trusting.url}/tokenize", json={"messages": HI, "chat_template": TEMPLATE})
    assert answer.status_code == 400 and "the model's own is used" in answer.json()["error"]["message"]


def test_as_many_tokens_as_fit(trusting: RunningServer) -> None:
    answer = ask(trusting, max_tokens=-1, ignore_eos=True, messages=[{"role": "user", "content": "x" * 4040}])
    usage = answer.json()["usage"]
    assert usage["total_tokens"] == 4096 and usage["completion_tokens"] > 1


def test_options_of_ollama_without_effect(trusting: RunningServer) -> None:
    answer = ask(
        trusting,
        "/api/chat",
        options={"num_gpu": 1, "num_predict": 1, "num_ctx": 9999},
        stream=False,
        max_tokens=None,
        return_token_ids=None,
    )
    assert answer.status_code == 200
    assert [told.split(" ")[2] for told in answer.headers.get_list("warning")] == ['"options', '"num_ctx=9999']


def test_names_of_the_model(trusting: RunningServer) -> None:
    cards = httpx.get(f"{trusting.url}/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["tiny", "alias"] and cards[0]["root"] == cards[1]["root"]
    assert [ask(trusting, **named).json()["model"] for named in ({}, {"model": "alias"}, {"model": "gpt-4o"})] == [
        "tiny",
        "alias",
        "gpt-4o",
    ]
    assert httpx.get(f"{trusting.url}/v1/models/alias").json()["id"] == "alias"
    assert httpx.get(f"{trusting.url}/v1/models/gpt-4o").json()["id"] == "tiny"
    assert ask(trusting, model="nobody").status_code == 404
    assert ask(trusting, "/api/chat", model="alias:latest", stream=False).json()["model"] == "alias:latest"
