"""Refusals by a request's headers alone: too many of them, too large a body, or one that is compressed."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import shown
from penstock.server.errors import ApiError

MAX_HEADERS = 128
MAX_HEADER_BYTES = 64 * 1024
MAX_LENGTH_DIGITS = 15
UPLOADS = "/v1/files"


class Limits:
    """Answers before the body has come: the connection reads on for a while, so that the client sees it."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, max_upload_bytes: int | None = None) -> None:
        """`max_upload_bytes` is for bodies that are written to disk as they come."""
        self._app, self._max_body_bytes = app, max_body_bytes
        self._max_upload_bytes = max_body_bytes if max_upload_bytes is None else max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        refused = self._refused(scope)
        if refused is not None:
            return await refused.response(scope["path"])(scope, receive, send)
        num_bytes, max_bytes = 0, self._max_bytes(scope)

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise self._too_large(scope)
            return message

        await self._app(scope, counted, send)

    def _refused(self, scope: Scope) -> ApiError | None:
        headers = scope["headers"]
        if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            return too_many_headers()
        for name, value in headers:
            length = value.strip().lstrip(b"0") if name == b"content-length" else b""
            if length.isdigit() and (len(length) > MAX_LENGTH_DIGITS or int(length) > self._max_bytes(scope)):
                return self._too_large(scope)
            if name == b"content-encoding" and not _is_plain(value):
                return ApiError(
                    415,
                    f"Content-Encoding: {shown(value.decode('latin-1'))} is not understood: send the body uncompressed",
                    code="unknown_encoding",
                    headers={"Accept-Encoding": "identity"},
                )
        return None

    def _max_bytes(self, scope: Scope) -> int:
        is_upload = scope.get("path") == UPLOADS and scope.get("method") == "POST"
        return self._max_upload_bytes if is_upload else self._max_body_bytes

    def _too_large(self, scope: Scope) -> ApiError:
        flag = "--max-files-mb" if scope.get("path") == UPLOADS else "--max-body-mb"
        return ApiError(
            413,
            f"the body is larger than {self._max_bytes(scope)} bytes: shorten it, or start the server "
            f"with a larger {flag}",
            code="body_too_large",
            headers={"Connection": "close"},
        )


def _is_plain(codings: bytes) -> bool:
    return all(one.strip().lower() in (b"", b"identity") for one in codings.split(b","))


def too_many_headers() -> ApiError:
    return ApiError(
        431,
        f"the request has too many headers: the limit is {MAX_HEADERS}, of {MAX_HEADER_BYTES} bytes "
        "in all; send fewer or shorter",
        code="headers_too_large",
        headers={"Connection": "close"},
    )
