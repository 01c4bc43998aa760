"""Errors in Anthropic's format, whichever part of the server raises them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.http.context import new_id
from penstock.server.http.errors import ApiError

PATH = "/v1/messages"
REQUEST_ID = "anthropic_request_id"  # scope key
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
STATUSES = {408: 504, 503: 529}  # Anthropic's statuses


def make_error_body(status: int, message: str, request_id: str) -> dict[str, Any]:
    status = STATUSES.get(status, status)
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def format_failure(error: ApiError, request_id: str) -> dict[str, Any]:
    return make_error_body(error.status, error.message, request_id)


class AnthropicErrors:
    """Middleware that gives Anthropic's routes a request id, and errors Anthropic's format."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not f"{scope['path']}/".startswith(f"{PATH}/"):
            return await self._app(scope, receive, send)
        scope[REQUEST_ID] = new_id("req_")
        await self._app(scope, receive, _ErrorSender(send, scope[REQUEST_ID]))


class _ErrorSender:
    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self._id = send, request_id
        self._start: Message | None = None  # of an error, held until its body is complete
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"request-id", self._id.encode())]
            if message["status"] >= 400:
                self._start = message
                return
        if self._start is None:
            return await self._send(message)
        self._body += message.get("body", b"")
        if not message.get("more_body"):
            await self._send_error(self._start)

    async def _send_error(self, start: Message) -> None:
        try:
            text = msgspec.json.decode(self._body)["error"]["message"]
        except (msgspec.DecodeError, KeyError, TypeError):
            text = self._body.decode(errors="replace")
        body = msgspec.json.encode(make_error_body(start["status"], text, self._id))
        headers = [
            (name, value) for name, value in start["headers"] if name not in (b"content-length", b"content-type")
        ]
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({**start, "status": STATUSES.get(start["status"], start["status"]), "headers": headers})
        await self._send({"type": "http.response.body", "body": body})
