"""What of a schema is relaxed is named in the answer, on every route; a strict one is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from penstock.errors import InvalidRequest
from penstock.server.common.structured_outputs import read_constraint
from penstock.server.openai.chat_body import ChatBody
from tests.server.running import RunningServer

SCHEMA = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2, "uniqueItems": True}},
    "required": ["tags"],
    "additionalProperties": False,
}
RELAXED = ["uniqueItems at /properties/tags"]
HI = [{"role": "user", "content": "Tags?"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "tags", "schema": SCHEMA}}


def post(server: RunningServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 9, "response_format": FORMAT},
    "/v1/completions": {"prompt": "Tags:", "max_tokens": 9, "structured_outputs": {"json": SCHEMA}},
    "/v1/responses": {
        "input": "Tags?",
        "max_output_tokens": 9,
        "text": {"format": {"type": "json_schema", "name": "tags", "schema": SCHEMA}},
    },
    "/v1/messages": {
        "model": "smollm2",
        "messages": HI,
        "max_tokens": 9,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "/api/chat": {"model": "smollm2", "messages": HI, "stream": False, "format": SCHEMA, "options": {"num_predict": 9}},
    "/generate": {"inputs": "Tags:", "parameters": {"max_new_tokens": 9, "grammar": {"type": "json", "value": SCHEMA}}},
}


@pytest.mark.parametrize("path", BODIES)
def test_the_answer_names_what_is_relaxed(server: RunningServer, path: str) -> None:
    answer = post(server, path, BODIES[path])
    assert answer.status_code == 200, answer.text
    assert answer.json()["relaxed"] == RELAXED
    assert answer.headers["warning"] == f'299 penstock "the schema is relaxed: {RELAXED[0]}"'


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat"]
)
def test_a_stream_names_it_in_the_end(server: RunningServer, path: str) -> None:
    answer = post(server, path, {**BODIES[path], "stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "{" in line]
    named = [event.get("relaxed", event.get("response", {}).get("relaxed")) for event in map(json.loads, lines)]
    assert answer.headers["warning"].startswith("299 penstock")
    assert named.count(RELAXED) == 1 and named.index(RELAXED) >= len(named) - 2


def test_what_is_kept_whole_says_nothing(server: RunningServer) -> None:
    body = {
        "messages": HI,
        "max_tokens": 12,
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "x",
                "schema": {
                    "type": "object",
                    "properties": {"a": {"type": "string", "format": "color"}},
                    "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
                },
            },
        },
    }
    answer = post(server, "/v1/chat/completions", body)
    assert answer.status_code == 200 and "relaxed" not in answer.json() and "warning" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/completions"])
def test_a_strict_schema_is_refused(server: RunningServer, path: str) -> None:
    body = json.loads(json.dumps(BODIES[path]))
    strict = (
        body.get("response_format", {}).get("json_schema") or body.get("structured_outputs") or body["text"]["format"]
    )
    strict["strict"] = True
    answer = post(server, path, body)
    assert answer.status_code == 400
    assert "uniqueItems at /properties/tags cannot be enforced" in answer.json()["error"]["message"]


def test_a_structural_tag_over_the_wire(server: RunningServer) -> None:
    form = {
        "type": "tag",
        "begin": "<tags>",
        "end": "</tags>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
    }
    for more in (
        {"response_format": {"type": "structural_tag", "format": form}},
        {"structured_outputs": {"structural_tag": json.dumps({"format": form})}},
    ):
        answer = post(server, "/v1/chat/completions", {"messages": HI, "max_tokens": 30, **more}).json()
        content = answer["choices"][0]["message"]["content"]
        assert content.startswith("<tags>") and content.endswith("</tags>") and answer["relaxed"] == RELAXED
        assert set(json.loads(content[6:-7])) == {"tags"}


def test_an_older_structural_tag_is_read() -> None:
    asked = {
        "type": "structural_tag",
        "triggers": ["<f"],
        "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}],
    }
    found = read_constraint(ChatBody.model_validate({"messages": HI, "response_format": asked}))
    assert found is not None and json.loads(str(found.structural_tag)) == asked and not found.strict
    both = {"response_format": asked, "structured_outputs": {"structural_tag": asked}}
    with pytest.raises(InvalidRequest, match="response_format and structured_outputs"):
        read_constraint(ChatBody.model_validate({"messages": HI, **both}))
