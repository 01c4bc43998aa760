"""A line in the log and a count in /metrics for every request, refused ones too."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.server.generation import Usage
from penstock.server.http.access import AccessLog
from penstock.server.http.log import ACCESS, JsonLines, QueuedHandler
from penstock.server.metrics import Metrics
from tests.hardening.fronted import FrontedServer
from tests.server.running import RunningServer

KEY = {"x-api-key": "one"}


def counts(running: RunningServer) -> dict[tuple[str, str, str], float]:
    page = httpx.get(f"{running.url}/metrics", headers={"x-api-key": "root"}).text
    found = re.findall(r'penstock:http_requests_total\{method="(.*?)",route="(.*?)",status="(.*?)"\} (\S+)', page)
    return {(method, route, status): float(value) for method, route, status, value in found}


def lines(running: RunningServer, word: str, number: int = 1) -> list[str]:
    end = time.monotonic() + 5
    while len(found := [line for line in running.log if word in line]) < number and time.monotonic() < end:
        time.sleep(0.01)
    return found


def raw(running: RunningServer, request: bytes) -> bytes:
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as line:
        line.sendall(request)
        return line.recv(4096)


def test_requests_are_logged_and_counted(keeping: RunningServer) -> None:
    before = counts(keeping)
    body = {"prompt": [20, 21, 22], "max_tokens": 5, "ignore_eos": True}
    for stream in (False, True):
        httpx.post(f"{keeping.url}/v1/completions?confidential=1", json={**body, "stream": stream}, headers=KEY)
    httpx.post(f"{keeping.url}/v1/completions", json={"prompt": 3.5}, headers=KEY)
    httpx.get(f"{keeping.url}/v1/files/file-unknown", headers=KEY)
    httpx.get(f"{keeping.url}/nowhere", headers=KEY)
    httpx.get(f"{keeping.url}/v1/models", headers={"x-api-key": "a wrong key"})
    httpx.get(f"{keeping.url}/v1/models", headers={**KEY, "Host": "evil.example"})
    httpx.get(f"{keeping.url}/v1/models", headers={**KEY, "Origin": "http://evil.example"})
    httpx.post(f"{keeping.url}/v1/completions", content=b"x", headers={**KEY, "Content-Encoding": "gzip"})
    httpx.request("PATCH", f"{keeping.url}/v1/models", headers=KEY)
    assert b" 400 " in raw(keeping, b"nonsense\r\n\r\n")
    assert b" 431 " in raw(keeping, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n")
    grown = {key: value - before.get(key, 0) for key, value in counts(keeping).items()}
    for key, count in (
        (("POST", "/v1/completions", "200"), 2),
        (("POST", "/v1/completions", "400"), 1),
        (("GET", "/v1/files/{id}", "404"), 1),
        (("GET", "other", "404"), 1),
        (("GET", "/v1/models", "401"), 1),
        (("GET", "/v1/models", "403"), 2),
        (("POST", "/v1/completions", "415"), 1),
        (("other", "/v1/models", "405"), 1),
        (("other", "other", "400"), 1),
        (("other", "other", "431"), 1),
    ):
        assert grown[key] == count, (key, grown)
    answered = lines(keeping, '"POST /v1/completions" 200', 2)
    assert all(
        re.search(
            r'127\.0\.0\.1:\d+ "POST /v1/completions" 200, \d+ ms, 3 tokens in, 5 out, queue \d+ ms, '
            r"first token \d+ ms, length, key-\w+, cmpl-\w+$",
            line,
        )
        for line in answered[-2:]
    )
    assert lines(keeping, '"GET /v1/models" 403', 2) and lines(keeping, '"GET /nowhere" 404')
    whole = "\n".join(keeping.log)
    assert "confidential" not in whole and "wrong key" not in whole
    assert '"GET /health' not in whole and '"GET /metrics" 200' not in whole


def test_prompts_are_not_logged(keeping: RunningServer) -> None:
    for body in ({"prompt": [20, 21, 31337], "max_tokens": 2}, {"prompt": "xyzzy plugh", "max_tokens": "many xyzzy"}):
        httpx.post(f"{keeping.url}/v1/completions", json={**body, "user": "xyzzy"}, headers=KEY)
    httpx.post(f"{keeping.url}/v1/chat/completions", json={"messages": [{"role": "xyzzy"}]}, headers=KEY)
    assert lines(keeping, '"POST /v1/chat/completions" 4')
    assert "xyzzy" not in "".join(keeping.log) and "31337" not in "".join(keeping.log)


def test_no_line_can_be_forged(keeping: RunningServer) -> None:
    raw(keeping, b'GET /a%0A12:00:00%20forged%1b[31m"x?q=1 HTTP/1.1\r\nHost: localhost\r\nx-api-key: one\r\n\r\n')
    assert '"GET /a%0A12:00:00%20forged%1B[31m%22x" 404,' in lines(keeping, "forged")[-1]
    raw(keeping, b"GET /" + b"y" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert len(lines(keeping, "yyy")[-1]) < 400


def test_an_answer_that_was_cut_off_says_so(keeping: RunningServer) -> None:
    body = {"prompt": [20], "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{keeping.url}/v1/completions", json=body, headers=KEY) as answer:
        next(answer.iter_lines())
    assert lines(keeping, "cut off")


def test_json_has_fields(caplog: pytest.LogCaptureFixture) -> None:
    access = AccessLog(Metrics())
    scope: dict[str, Any] = {
        "client": ("::1", 5),
        "method": "POST",
        "path": "/v1/chat/completions",
        "usage": Usage(num_prompt=3, num_output=4),
    }
    with caplog.at_level(logging.INFO, ACCESS):
        logging.getLogger(ACCESS).propagate = True
        access.answer(scope, "/v1/chat/completions", 200, 0.5, True)
        AccessLog(Metrics(), is_logged=False).answer(scope, "/v1/chat/completions", 200, 0.5, True)
    assert len(caplog.records) == 1  # --no-access-log has no lines
    told = json.loads(JsonLines().format(caplog.records[0]))
    assert {
        "client": "[::1]:5",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "ms": 500,
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cut_off": False,
    }.items() <= told.items()


def test_a_log_that_nobody_reads_holds_nothing_up() -> None:
    reader, writer = os.pipe()
    handler = QueuedHandler(writer, max_waiting=100)
    begun_s = time.monotonic()
    for number in range(3000):
        handler.emit(logging.LogRecord(ACCESS, logging.INFO, "", 0, "%s", (f"{number} " + "x" * 100,), None))
        if number % 50 == 0:
            time.sleep(0.001)
    assert time.monotonic() - begun_s < 2
    os.set_blocking(reader, False)
    read, end = b"", time.monotonic() + 10
    while b"were dropped" not in read:
        assert time.monotonic() < end
        try:
            read += os.read(reader, 1 << 20)
        except BlockingIOError:
            handler.emit(logging.LogRecord(ACCESS, logging.INFO, "", 0, "more", (), None))
            time.sleep(0.02)
    dropped = int(re.findall(rb"(\d+) access log lines were dropped", read)[0])
    assert dropped > 1000
    handler.close()
    os.close(reader)
    os.close(writer)


def test_connections_without_a_seat_are_counted() -> None:
    metrics = Metrics()
    with FrontedServer() as fronted:
        fronted.front.server_state.access = AccessLog(metrics)
        fronted.front.server_state.slots.max_per_peer = 0
        fronted.front.server_state.slots._taken["127.0.0.1"] = {}
        with fronted.connect() as line:
            assert b" 503 " in line.recv(4096)
    assert b'penstock:connections_refused_total{reason="seats"} 1.0' in metrics.render()
    assert b'penstock:connections_refused_total{reason="descriptors"} 0.0' in metrics.render()


def test_prompts_are_logged_where_that_is_asked_for(tiny_model: Path) -> None:
    flags = (str(tiny_model), "--load-format", "dummy", "--threads", "1", "--log-format", "json")
    with RunningServer(*flags, "--enable-log-requests", "--max-log-len", "9") as running:
        for prompt in ("a secret\nthat is long", [20, 21]):
            body = {"prompt": prompt, "max_tokens": 3, "temperature": 0.5, "stop": ["zzz"]}
            assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 200
        text, ids = (json.loads(line) for line in lines(running, "parameters", 2))
    assert text["prompt"] == "a secret\n" and text["request_id"].startswith("req_") and text["prompt_tokens"] > 9
    assert text["parameters"] == {"temperature": 0.5, "max_tokens": 3, "stop": "('zzz',)"}
    assert (ids["prompt"], ids["prompt_tokens"]) == ([20, 21], 2) and "prompt [20, 21]" in ids["message"]


def test_prompts_are_not_logged_unasked(keeping: RunningServer) -> None:
    body = {"prompt": "very confidential", "max_tokens": 1}
    answer = httpx.post(f"{keeping.url}/v1/completions", json=body, headers=KEY)
    assert answer.status_code == 200 and lines(keeping, answer.json()["id"])
    assert not any("confidential" in line or "parameters" in line for line in keeping.log)
