"""Warnings to a client: few headers, in ASCII, on answers, streams and errors alike, and few lines in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from penstock.server.http import errors as errors_module
from penstock.server.http.errors import MAX_LINES, MAX_WARNING_CHARS, MAX_WARNINGS, ApiError, WarningHeaders, warn

DONE = PlainTextResponse("done")


@pytest.fixture(autouse=True)
def journal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(errors_module, "_log_limiter", errors_module._LogLimiter())
    yield


def warnings_of(texts: list[str], answer: Response = DONE) -> list[str]:
    async def route(request: Request) -> Response:
        for text in texts:
            warn(request, text)
        return answer

    app = Starlette(routes=[Route("/here", route)])
    app.add_middleware(WarningHeaders)
    return TestClient(app).get("/here").headers.get_list("warning")


def test_each_text_is_a_header() -> None:
    assert warnings_of(["num_gpu is ignored", 'say "so" \\ now']) == [
        '299 penstock "num_gpu is ignored"',
        '299 penstock "say \\"so\\" \\\\ now"',
    ]
    assert warnings_of([]) == []


def test_streams_and_errors_have_them() -> None:
    assert len(warnings_of(["a"], StreamingResponse(iter([b"x", b"y"])))) == 1
    assert len(warnings_of(["a"], ApiError(400, "no").response("/here"))) == 1


def test_no_text_leaves_its_line() -> None:
    [header] = warnings_of(["a\r\nSet-Cookie: b=c\x00\x7f é 漢\ud800"])
    assert header.isascii() and header.isprintable() and "\\\\xe9" in header


def test_they_are_bounded() -> None:
    found = warnings_of([f"{number} {'x' * 10_000}" for number in range(100)])
    assert len(found) == MAX_WARNINGS
    assert max(map(len, found)) <= MAX_WARNING_CHARS + len('299 penstock ""')
    assert len(warnings_of(["same"] * 10)) == 1


def test_log_has_each_text_once_a_while(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "penstock.server"):
        for number in range(3 * MAX_LINES):
            warnings_of(["same", f"other {number}"])
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:2] == ["/here: same", "/here: other 0"]
    assert len(lines) == len(set(lines)) == MAX_LINES


def test_log_begins_anew(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1e6
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with caplog.at_level(logging.WARNING, "penstock.server"):
        warnings_of(["same"])
        now_s += errors_module.WINDOW_S + 1
        warnings_of(["same"])
    assert len(caplog.records) == 2
