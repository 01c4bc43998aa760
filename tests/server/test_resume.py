"""Streams that go on in another server from any mark: what was shown and what follows are one answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.server.http.relay import MARK
from tests.server.routing import KEY, serve
from tests.server.running import RunningServer

HEADERS = {"penstock-router-key": KEY, "penstock-relay": "ab" * 16 + ".1700000000", "content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "hi there"}]
ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": MESSAGES, "max_tokens": 60, "ignore_eos": True, "logprobs": True, "top_logprobs": 2,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stop": ["\u0005\u0015zz"]},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 60},
    "/v1/responses": {"input": "hi there", "max_output_tokens": 60},
    "/generate_stream": {"inputs": "hi there", "parameters": {"max_new_tokens": 60, "do_sample": True}},
}  # fmt: skip
TIMES = rb'"(timings|completed_at|cached_tokens|cache_read_input_tokens)":({[^}]*}|[0-9.eE+-]+|null)'


@pytest.fixture(scope="module")
def servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningServer]]:
    folder = tmp_path_factory.mktemp("resume")
    with serve(tiny_model, folder) as one, serve(tiny_model, folder) as two:
        yield [one, two]


def _ask(server: RunningServer, path: str, body: Any, resume: Any = None, **headers: str) -> httpx.Response:
    told = b"" if resume is None else json.dumps(resume).encode()
    own = {**HEADERS, **({"penstock-resume-bytes": str(len(told))} if told else {}), **headers}
    return httpx.post(f"{server.url}{path}", content=told + json.dumps(body).encode(), headers=own, timeout=60)


def _cut(data: bytes) -> tuple[list[tuple[bytes, Any]], bytes]:
    """The events before each mark with the mark, and what follows the last."""
    units, held = [], b""
    for line in data.splitlines(keepends=True):
        if line.startswith(MARK):
            units.append((held, json.loads(line[len(MARK) :])))
            held = b""
        else:
            held += line
    return units, held


def _join(units: list[tuple[bytes, Any]]) -> list[list[Any]]:
    parts: dict[tuple[int, int], list[Any]] = {}
    for _, mark in units:
        for part in mark:
            one = parts.setdefault((part[0], part[1]), [*part[:2], [], *part[3:7], []])
            one[2] += part[2]
            one[3:7] = part[3:7]
            one[7] += part[7]
    return list(parts.values())


@pytest.mark.parametrize("path", ASKS)
def test_any_mark_can_be_gone_on_from(servers: list[RunningServer], path: str) -> None:
    body = {"temperature": 1.0, **ASKS[path], "stream": True}
    first = _ask(servers[0], path, body)
    kind = first.headers["penstock-relay-kind"]
    units, last = _cut(first.content)
    whole = re.sub(TIMES, b"", b"".join(events for events, _ in units) + last)
    assert len(units) >= 2
    for num_shown in sorted({1, 2, len(units) // 2, len(units) - 1, len(units)}):
        shown = units[:num_shown]
        rest = _ask(servers[1], path, body, {"kind": kind, "parts": _join(shown)})
        assert rest.status_code == 200, rest.text
        more, end = _cut(rest.content)
        said = b"".join(events for events, _ in (*shown, *more)) + end
        assert re.sub(TIMES, b"", said) == whole


def test_what_cannot_be_gone_on_from_is_refused(servers: list[RunningServer]) -> None:
    path, body = "/v1/completions", {"prompt": "abc", "max_tokens": 5, "stream": True}
    kind = _ask(servers[0], path, body).headers["penstock-relay-kind"]
    part = [0, 0, [1, 2], None, None, False, 0, []]
    for resume, status in (
        ({"kind": "another", "parts": [part]}, 409),
        ({"kind": kind, "parts": [[7, *part[1:]]]}, 400),
        ({"kind": kind, "parts": [[0, 9, *part[2:]]]}, 400),
        ({"kind": kind, "parts": "?"}, 400),
        ({"kind": kind, "parts": [[0, 0, [1] * 5, "length", None, False, 0, []], part]}, 400),
    ):
        answer = _ask(servers[0], path, body, resume)
        assert answer.status_code == status, (resume, answer.text)
    plain = {"penstock-resume-bytes": "999999"}
    assert _ask(servers[0], path, body, **plain).status_code == 400
    assert _ask(servers[0], path, body, **{"penstock-router-key": "guess"}).status_code == 403
    forged = httpx.post(f"{servers[0].url}{path}", json=body, headers=plain)
    assert forged.status_code == 200 and "penstock-relay-kind" not in forged.headers and ": penstock" not in forged.text
