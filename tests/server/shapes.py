"""What an answer of each route may look like, by the API that the route belongs to."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

from penstock.server.http.errors import LLAMA_PATHS


def _openai(body: Any) -> bool:
    error = body["error"]
    return set(body) == {"error"} and set(error) == {"message", "type", "param", "code"} and bool(error["message"])


def _anthropic(body: Any) -> bool:
    error = body["error"]
    return body["type"] == "error" and isinstance(error["type"], str) and bool(error["message"])


def _ollama(body: Any) -> bool:
    return isinstance(body["error"], str) and bool(body["error"])


def _tgi(body: Any) -> bool:
    return isinstance(body["error"], str) and isinstance(body["error_type"], str)


def _llama(body: Any) -> bool:
    error = body["error"]
    return isinstance(error["code"], int) and isinstance(error["type"], str) and bool(error["message"])


def _generate(body: Any) -> bool:
    """TGI's, or for bodies of SGLang's like OpenAI's."""
    return _tgi(body) if isinstance(body["error"], str) else _openai(body)


SHAPES: list[tuple[str, Callable[[Any], bool]]] = [
    ("/v1/messages", _anthropic),
    ("/api/", _ollama),
    ("/generate", _generate),
    *((path, _llama) for path in LLAMA_PATHS),
    ("/", _openai),
]


def check_answer(path: str, answer: httpx.Response) -> None:
    """No answer is a failure of the server; all that is JSON parses; every error has its API's shape."""
    told = f"{answer.status_code} from {path}: {answer.text[:500]}"
    assert answer.status_code < 500, told
    kind = answer.headers.get("content-type", "")
    parsed = json.loads(answer.content) if kind.startswith("application/json") else None
    if answer.status_code >= 400:
        assert parsed is not None, f"an error that is no JSON: {told}"
        right = _tgi if path == "/" else next(right for prefix, right in SHAPES if path.startswith(prefix))
        try:
            assert right(parsed), f"an error of another shape: {told}"
        except (KeyError, TypeError):
            raise AssertionError(f"an error of another shape: {told}") from None
    elif kind.startswith("text/event-stream"):
        check_events(path, answer.text)


def check_events(path: str, text: str) -> None:
    """Every event parses, and none is a failure of the server."""
    for line in text.split("\n"):
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            error = event.get("error") if isinstance(event, dict) else None
            failed = isinstance(error, dict) and error.get("type") in ("server_error", "api_error")
            assert not failed, f"{path} streamed {line}"
