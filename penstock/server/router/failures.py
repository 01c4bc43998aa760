"""Errors of the router itself, in the format of the API that is asked."""

from __future__ import annotations

from starlette.responses import Response

from penstock.server.anthropic.errors import PATH as ANTHROPIC_PATH
from penstock.server.anthropic.errors import make_error_body
from penstock.server.http import sse
from penstock.server.http.context import json_response, new_id
from penstock.server.http.errors import ApiError, format_ollama, format_tgi

RESPONSES_PATH = "/v1/responses"


def make_no_server_error(states: str = "") -> ApiError:
    """Make the error of a request that no server takes; `states` says why, for those who may know."""
    return ApiError(
        503,
        "no server takes requests now: try again later" + (f" ({states})" if states else ""),
        code="no_upstream",
        headers={"Retry-After": "2"},
    )


def make_owner_error() -> ApiError:
    """Make the error of a request that only a server that is lost could have answered."""
    return ApiError(
        503,
        "the one server that has what this request refers to is not there: try again when it is back, or send the "
        "whole input to begin anew",
        code="upstream_lost",
        headers={"Retry-After": "2"},
    )


def encode_end(error: ApiError, path: str) -> bytes:
    """Encode what ends a stream that cannot go on."""
    if path.startswith("/api/"):
        return sse.event(format_ollama(error)[1]).removeprefix(b"data: ").removesuffix(b"\n")
    if path.startswith(ANTHROPIC_PATH):
        return sse.named_event("error", make_error_body(error.status, error.message, new_id("req_")))
    if path.startswith(RESPONSES_PATH):
        return sse.named_event(
            "error", {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        )
    if path.startswith("/generate"):
        return sse.event(format_tgi(error)[1])
    return sse.event(error.body()) + sse.DONE


def refuse(error: ApiError, path: str) -> Response:
    """Make the response of an error before any part of an answer."""
    if path.startswith(ANTHROPIC_PATH):
        return json_response(make_error_body(error.status, error.message, new_id("req_")), error.status, error.headers)
    return error.response(path)
