"""Errors of the API, and warnings in headers that a request was answered, but not exactly as written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import (
    SHOWN_CHARS,
    Busy,
    DeadlinePassed,
    EngineFailed,
    InvalidModel,
    InvalidRequest,
    PenstockError,
    PromptTooLong,
    quote,
)
from penstock.server.http.unknown_keys import UNKNOWN, UNSUPPORTED

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
Kind = TypeVar("Kind", bound=BaseModel)
WHOLE_LIMIT = f"the limit is {2**63 - 1}(64 bits); send a smaller one"
MAX_MESSAGE_CHARS = 1_000  # of an error, to clients and in the log
log = logging.getLogger("penstock.server")
WARNINGS = "warnings"  # scope key: a request's warnings so far
MAX_WARNINGS = 8  # per request
MAX_WARNING_CHARS = 300
WINDOW_S = 60.0
MAX_LINES = 20  # per window in the log, no text twice


class ApiError(Exception):
    """A failure with its HTTP status. Long messages are cut so that input is not echoed whole."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, int] | None = None,
    ) -> None:
        """`details` are fields of llama-server's errors."""
        message = _cut(message, MAX_MESSAGE_CHARS)
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers, self.details = dict(headers or {}), dict(details or {})
        self.api_path: str | None = None  # of the API whose format it has, if not the request's

    @property
    def type(self) -> str:
        return TYPES.get(self.status, "server_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> Response:
        """Make a response in the format of the API at `path`."""
        status, body = _find_formatter(self.api_path or path)(self)
        return Response(msgspec.json.encode(body), status, self.headers, "application/json")


Formatter = Callable[[ApiError], tuple[int, dict[str, Any]]]  # status and body


def format_openai(error: ApiError) -> tuple[int, dict[str, Any]]:
    return error.status, error.body()


def format_ollama(error: ApiError) -> tuple[int, dict[str, Any]]:
    return error.status, {"error": error.message}


def format_tgi(error: ApiError) -> tuple[int, dict[str, Any]]:
    """Format an error for TGI, with its statuses where it has one."""
    status, kind = TGI_TYPES.get(error.status, (error.status, "generation" if error.status >= 500 else "validation"))
    return status, {"error": error.message, "error_type": kind}


def format_llama(error: ApiError) -> tuple[int, dict[str, Any]]:
    """Format an error as llama-server does, with its names of the kinds."""
    kind = LLAMA_TYPES.get(error.code or "") or ("unavailable_error" if error.status == 503 else error.type)
    more: dict[str, Any] = {**error.details, **({"param": error.param} if error.param else {})}
    return error.status, {"error": {"code": error.status, "message": error.message, "type": kind, **more}}


LLAMA_TYPES = {"context_length_exceeded": "exceed_context_size_error"}  # by our code
TGI_TYPES = {400: (422, "validation"), 408: (424, "generation"), 429: (429, "overloaded"), 503: (429, "overloaded")}

# by path prefix; "/" is that path alone
LLAMA_PATHS = ("/completion", "/chat/completions", "/infill", "/props", "/apply-template", "/embedding")
FORMATTERS: dict[str, Formatter] = {
    "/api/": format_ollama,
    "/generate": format_tgi,
    "/": format_tgi,
    **dict.fromkeys(LLAMA_PATHS, format_llama),
}


def _find_formatter(path: str) -> Formatter:
    return next(
        (
            formatter
            for beginning, formatter in FORMATTERS.items()
            if path == beginning or beginning != "/" and path.startswith(beginning)
        ),
        format_openai,
    )


def to_api_error(error: Exception) -> ApiError:
    """Convert any exception; what is not the client's fault stays vague."""
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
        return ApiError(
            400,
            str(error),
            param="messages",
            code="context_length_exceeded",
            details={"n_prompt_tokens": error.num_tokens, "n_ctx": error.limit},
        )
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error))
    if isinstance(error, (EngineFailed, InvalidModel)):
        return ApiError(500, str(error), code="engine_failed")
    if isinstance(error, PenstockError):
        return ApiError(500, str(error))
    return ApiError(500, f"internal error ({type(error).__name__}); see the server's log")


def make_body_error(error: ValidationError) -> ApiError:
    """Describe the first thing wrong with a body, by its field's name."""
    errors = error.errors(include_url=False)
    first = max((one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]), key=_progress)
    param = ".".join(_path(first["loc"]))
    if first["type"] in (UNKNOWN, UNSUPPORTED):
        return _make_key_error(first)
    if first["type"] == "missing":
        return ApiError(400, f"missing required parameter: {param!r}", param=param, code="missing_required_parameter")
    message = _describe(first)
    return ApiError(
        400,
        f"{param}={quote(first.get('input'))}: {message}" if param else message,
        param=param or None,
        code="invalid_value",
    )


def validate(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """Validate translated values as a body; an error is the client's."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise make_body_error(error) from None


def _make_key_error(error: ErrorDetails) -> ApiError:
    param, message = ".".join([*_path(error["loc"][:-1]), _cut(str(error["loc"][-1]))]), error["ctx"]["told"]
    if error["type"] == UNSUPPORTED:
        return ApiError(400, f"{param} is not supported: {message}", param=param, code="unsupported_parameter")
    meant = f": did you mean {message!r}?" if message else ""
    return ApiError(400, f"unknown parameter: {param!r}{meant}", param=param, code="unknown_parameter")


def _progress(error: ErrorDetails) -> tuple[bool, int, list[int]]:
    """Rank a union member's error: the one that got furthest was meant. Lengths are checked after items."""
    at = [part for part in error["loc"] if isinstance(part, int)]
    return error["type"] in ("too_long", "too_short"), len(error["loc"]), at


def _describe(error: ErrorDetails) -> str:
    """Describe an error in JSON's terms, with the limit and the remedy."""
    details = error.get("ctx", {})
    if error["type"] == "too_long":
        return f"it has {len(error['input'])} items: the limit is {details['max_length']}; send fewer"
    if error["type"] == "string_too_long":
        return f"it has {len(error['input'])} characters: the limit is {details['max_length']}; shorten it"
    if error["type"] == "union_tag_invalid":
        return f"{quote(details['tag'])} is none of {details['expected_tags']}"
    return JSON_WORDS.get(error["type"]) or error["msg"].removeprefix("Value error, ")


JSON_WORDS = {
    "model_type": "Input should be an object",
    "dict_type": "Input should be an object",
    "model_attributes_type": "Input should be an object",
    "list_type": "Input should be an array",
    "int_parsing_size": WHOLE_LIMIT,
}


UNION_MEMBERS = ("str", "int", "float", "bool")  # never field names


def _path(parts: tuple[int | str, ...]) -> list[str]:
    """Drop the names pydantic gives to union members, and cut long keys."""
    return [
        _cut(str(part)) for part in parts if isinstance(part, int) or part.isidentifier() and part not in UNION_MEMBERS
    ][:6]


def _cut(text: str, max_chars: int = SHOWN_CHARS) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def warn(request: Request, text: str) -> None:
    """Send `text` in a Warning header, if the response has not begun, and log it. Long texts are cut."""
    warnings: list[str] = request.scope.setdefault(WARNINGS, [])
    text = _to_ascii(text)
    if text not in warnings and len(warnings) < MAX_WARNINGS:
        warnings.append(text)
        _log_limiter.write(f"{request.scope['path'][:MAX_WARNING_CHARS]}: {text}")


def _to_ascii(text: str) -> str:
    ascii = " ".join(text[: MAX_WARNING_CHARS + 1].split()).encode("ascii", "backslashreplace").decode()
    ascii = "".join(char if char.isprintable() else "?" for char in ascii)
    return ascii if len(ascii) <= MAX_WARNING_CHARS else ascii[: MAX_WARNING_CHARS - 3] + "..."


class _LogLimiter:
    """Log no text twice within a time window, and at most MAX_LINES lines."""

    def __init__(self) -> None:
        self._begun_s = 0.0
        self._written: set[str] = set()

    def write(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._begun_s > WINDOW_S:
            self._begun_s, self._written = now_s, set()
        if text not in self._written and len(self._written) < MAX_LINES:
            self._written.add(text)
            log.warning("%s", text)


_log_limiter = _LogLimiter()


class WarningHeaders:
    """Middleware that adds one Warning header per warning of the request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def add_headers(message: Message) -> None:
            if message["type"] == "http.response.start" and scope.get(WARNINGS):
                message["headers"] = [*message.get("headers", ()), *map(_encode_header, scope[WARNINGS])]
            await send(message)

        await self._app(scope, receive, add_headers)


def _encode_header(text: str) -> tuple[bytes, bytes]:
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return b"warning", f'299 penstock "{quoted}"'.encode("ascii")
