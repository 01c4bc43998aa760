"""What is refused before it is read: too many headers, too large a body."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.errors import ApiError

MOST_HEADERS = 128
MOST_HEADER_BYTES = 64 * 1024
MOST_DISCARDED = 1 << 28
DISCARD_S = 10.0


class Limits:
    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app, self._max_body_bytes = app, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        refused = self._refused(scope)
        if refused is not None:
            await _discard(receive)
            return await refused.response(scope["path"])(scope, receive, send)
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                await _discard(receive)
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _refused(self, scope: Scope) -> ApiError | None:
        headers = scope["headers"]
        if len(headers) > MOST_HEADERS or sum(len(name) + len(value) for name, value in headers) > MOST_HEADER_BYTES:
            return ApiError(431, f"the request has {len(headers)} headers: the limit is {MOST_HEADERS}, of "
                                 f"{MOST_HEADER_BYTES} bytes in all")
        length = next((value for name, value in headers if name == b"content-length"), b"0")
        return self._too_large() if length.isdigit() and int(length) > self._max_body_bytes else None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body_bytes} bytes: shorten it, or start the server "
                             "with a larger --max-body-mb", code="body_too_large", headers={"Connection": "close"})


async def _discard(receive: Receive) -> None:
    """Read on for a while: a client that is cut off while it sends never sees the answer."""
    async def read() -> None:
        num_bytes = 0
        while num_bytes < MOST_DISCARDED:
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if not message.get("more_body", False):
                return

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read(), DISCARD_S)
