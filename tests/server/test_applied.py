"""`include_applied` and `speculation` on every API: the ledger with the answer, and a request's own limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer

TEXT = "one two three one two three one two three"
MESSAGES = [{"role": "user", "content": TEXT}]
# path → body, and where Penstock's fields go
APIS: dict[str, tuple[dict[str, Any], str | None]] = {
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": 12, "temperature": 0, "ignore_eos": True}, None),
    "/v1/completions": ({"prompt": TEXT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}, None),
    "/v1/responses": ({"input": TEXT, "max_output_tokens": 12, "temperature": 0}, None),
    "/v1/messages": ({"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}, None),
    "/api/chat": ({"messages": MESSAGES, "options": {"num_predict": 12, "temperature": 0}}, None),
    "/api/generate": ({"prompt": TEXT, "options": {"num_predict": 12, "temperature": 0}}, None),
    "/generate": ({"inputs": TEXT, "parameters": {"max_new_tokens": 12}}, "parameters"),
}
STREAMS = {path: path for path in APIS} | {"/generate": "/generate_stream"}


@pytest.fixture(scope="module")
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    corpus = tmp_path_factory.mktemp("texts") / "corpus.txt"
    corpus.write_text(TEXT)
    drafts = json.dumps({"method": "auto", "corpus": str(corpus)})
    options = ["--load-format", "dummy", "--threads", "1", "--served-model-name", "tiny"]
    with RunningServer(str(tiny_model), *options, "--speculative-config", drafts) as running:
        yield running


def make_body(path: str, **more: Any) -> dict[str, Any]:
    body, place = APIS[path]
    body = json.loads(json.dumps(body))
    (body if place is None else body[place]).update(more)
    return body


def post(server: RunningServer, path: str, **more: Any) -> httpx.Response:
    body = make_body(path, **more)
    return httpx.post(f"{server.url}{path}", json={"stream": False, **body} if "/api/" in path else body, timeout=60)


@pytest.mark.parametrize("path", APIS)
def test_whole_answers(tiny_server: RunningServer, path: str) -> None:
    plain = post(tiny_server, path)
    assert plain.status_code == 200 and "penstock" not in plain.json()
    told = post(tiny_server, path, include_applied=True, speculation={"num_speculative_tokens": 1}).json()["penstock"]
    kinds = [one["kind"] for one in told["applied"]]
    assert told["exact"] is True and kinds[:3] == ["weights", "kv_cache", "kernels"]
    off = post(tiny_server, path, include_applied=True, speculation=False).json()["penstock"]
    assert "drafts" not in [one["kind"] for one in off["applied"]]


@pytest.mark.parametrize("path", APIS)
def test_streams_tell_it_once_and_last(tiny_server: RunningServer, path: str) -> None:
    body = make_body(path, include_applied=True) | ({} if path == "/generate" else {"stream": True})
    with httpx.stream("POST", f"{tiny_server.url}{STREAMS[path]}", json=body, timeout=60) as response:
        lines = [line.removeprefix("data:").strip() for line in response.iter_lines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    told = [at for at, event in enumerate(events) if "penstock" in event or "penstock" in event.get("response", {})]
    last = len(events) - 1 - (path == "/v1/messages")  # message_stop follows
    assert told == [last]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_several_choices_and_a_drawn_seed(tiny_server: RunningServer, path: str) -> None:
    body = make_body(path, include_applied=True, n=3, temperature=1, stream=True)
    with httpx.stream("POST", f"{tiny_server.url}{path}", json=body, timeout=60) as response:
        lines = [line for line in response.iter_lines() if "penstock" in line]
    assert len(lines) == 1 and '"kind":"seed"' in lines[0] and '"exact":false' in lines[0]


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("asked", [True, "ngram", {"method": "eagle9"}, {"num_speculative_tokens": 0}])
def test_what_is_no_limit_is_refused(tiny_server: RunningServer, path: str, asked: Any) -> None:
    response = post(tiny_server, path, speculation=asked)
    assert response.status_code in (400, 422) and ("speculati" in response.text or "eagle9" in response.text), (
        response.text
    )


def test_dropped_turns_are_told(tiny_server: RunningServer) -> None:
    turns = [{"role": role, "content": "word " * 700} for role in ("user", "assistant", "user", "assistant")]
    body = {"input": [*turns, {"role": "user", "content": TEXT}], "max_output_tokens": 4, "truncation": "auto"}
    response = httpx.post(f"{tiny_server.url}/v1/responses", json=body | {"include_applied": True}, timeout=60)
    told = {one["kind"]: one["value"] for one in response.json()["penstock"]["applied"]}
    assert told["truncation"]["messages"] in (2, 4)
