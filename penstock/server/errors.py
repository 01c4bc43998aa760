"""Every failure as a response: in OpenAI's shape, {"error": {"message", "type", "param", "code"}}, or a route's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import Response

from penstock.errors import (
    SHOWN_CHARS,
    Busy,
    DeadlinePassed,
    EngineFailed,
    InvalidModel,
    InvalidRequest,
    PenstockError,
    PromptTooLong,
    shown,
)
from penstock.server.unknown import UNKNOWN, UNSUPPORTED

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}


WHOLE_LIMIT = f"the limit is {2**63 - 1}, the largest of 64 bits; send a smaller one"
MAX_MESSAGE_CHARS = 1_000  # no failure tells a client, or the log, more than this


class ApiError(Exception):
    """A failure with its HTTP status. A long message is cut, so that nobody's input comes back whole."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = _cut(message, MAX_MESSAGE_CHARS)
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        return TYPES.get(self.status, "server_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> Response:
        """In the shape that clients of `path` know."""
        status, body = _shape(path)(self)
        return Response(msgspec.json.encode(body), status, self.headers, "application/json")


Shape = Callable[[ApiError], tuple[int, dict[str, Any]]]  # the status and the body


def openai_shape(error: ApiError) -> tuple[int, dict[str, Any]]:
    return error.status, error.body()


def ollama_shape(error: ApiError) -> tuple[int, dict[str, Any]]:
    return error.status, {"error": error.message}


def tgi_shape(error: ApiError) -> tuple[int, dict[str, Any]]:
    """TGI's own statuses, where it has one for the case."""
    status, kind = TGI_TYPES.get(error.status, (error.status, "generation" if error.status >= 500 else "validation"))
    return status, {"error": error.message, "error_type": kind}


TGI_TYPES = {400: (422, "validation"), 408: (424, "generation"), 429: (429, "overloaded"), 503: (429, "overloaded")}

# by the beginning of a path; "/" is that path alone
SHAPES: dict[str, Shape] = {"/api/": ollama_shape, "/generate": tgi_shape, "/": tgi_shape}


def _shape(path: str) -> Shape:
    return next(
        (
            shape
            for beginning, shape in SHAPES.items()
            if path == beginning or beginning != "/" and path.startswith(beginning)
        ),
        openai_shape,
    )


def as_api_error(error: Exception) -> ApiError:
    """What the client is told of any exception; what is no fault of its own stays vague."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(
            error.status,
            str(error),
            code="rate_limit_exceeded" if error.status == 429 else "unavailable",
            headers={"Retry-After": str(error.retry_after_s)},
        )
    if isinstance(error, DeadlinePassed):
        return ApiError(408, str(error), code="timeout")
    if isinstance(error, PromptTooLong):
        return ApiError(400, str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error))
    if isinstance(error, (EngineFailed, InvalidModel)):
        return ApiError(500, str(error), code="engine_failed")
    if isinstance(error, PenstockError):
        return ApiError(500, str(error))
    return ApiError(500, f"the server failed on this request ({type(error).__name__}); its log says where")


def invalid_body(error: ValidationError) -> ApiError:
    """The first thing wrong with a body, by its name."""
    errors = error.errors(include_url=False)
    first = max((one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]), key=_progress)
    param = ".".join(_path(first["loc"]))
    if first["type"] in (UNKNOWN, UNSUPPORTED):
        return _unknown(first)
    if first["type"] == "missing":
        return ApiError(400, f"missing required parameter: {param!r}", param=param, code="missing_required_parameter")
    told = _told(first)
    return ApiError(
        400,
        f"{param}={shown(first.get('input'))}: {told}" if param else told,
        param=param or None,
        code="invalid_value",
    )


def _unknown(error: ErrorDetails) -> ApiError:
    param, told = ".".join([*_path(error["loc"][:-1]), _cut(str(error["loc"][-1]))]), error["ctx"]["told"]
    if error["type"] == UNSUPPORTED:
        return ApiError(400, f"{param} is not supported: {told}", param=param, code="unsupported_parameter")
    meant = f": did you mean {told!r}?" if told else ""
    return ApiError(400, f"unknown parameter: {param!r}{meant}", param=param, code="unknown_parameter")


def _progress(error: ErrorDetails) -> tuple[bool, int, list[int]]:
    """How far a union's member got: the furthest is the one that was meant. Lengths are judged after all items."""
    at = [part for part in error["loc"] if isinstance(part, int)]
    return error["type"] in ("too_long", "too_short"), len(error["loc"]), at


def _told(error: ErrorDetails) -> str:
    """An error in JSON's words, with the limit and what to do about it."""
    details = error.get("ctx", {})
    if error["type"] == "too_long":
        return f"it has {len(error['input'])} items: the limit is {details['max_length']}; send fewer"
    if error["type"] == "string_too_long":
        return f"it has {len(error['input'])} characters: the limit is {details['max_length']}; shorten it"
    if error["type"] == "union_tag_invalid":
        return f"{shown(details['tag'])} is none of {details['expected_tags']}"
    return PLAIN_WORDS.get(error["type"]) or error["msg"].removeprefix("Value error, ")


PLAIN_WORDS = {
    "model_type": "Input should be an object",
    "dict_type": "Input should be an object",
    "model_attributes_type": "Input should be an object",
    "list_type": "Input should be an array",
    "int_parsing_size": WHOLE_LIMIT,
}


MEMBERS = ("str", "int", "float", "bool")  # no field has such a name


def _path(parts: tuple[int | str, ...]) -> list[str]:
    """Without the names that pydantic gives the members of a union. A client's own key is cut."""
    return [_cut(str(part)) for part in parts if isinstance(part, int) or part.isidentifier() and part not in MEMBERS][
        :6
    ]


def _cut(text: str, most: int = SHOWN_CHARS) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
