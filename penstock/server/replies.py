"""How an answer leaves a connection: its flow, its framing, and whole answers in place of the app's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from penstock.server.anthropic.errors import PATH as ANTHROPIC_PATH
from penstock.server.anthropic.errors import error_body
from penstock.server.context import new_id
from penstock.server.errors import ApiError

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent


class Flow(FlowControl):
    """Reading is paused, besides, while bytes that have been read wait to be parsed."""

    is_held = False

    def pause_reading(self) -> None:
        if not self.read_paused and not self.is_held:
            self._transport.pause_reading()
        self.read_paused = True

    def resume_reading(self) -> None:
        if self.read_paused and not self.is_held:
            self._transport.resume_reading()
        self.read_paused = False

    def hold(self) -> None:
        if not self.read_paused and not self.is_held:
            self._transport.pause_reading()
        self.is_held = True

    def release(self) -> None:
        self.is_held = False
        if not self.read_paused:
            self._transport.resume_reading()


class UnframedCycle(RequestResponseCycle):
    """An answer to a client that knows no chunks: without a length, it ends with the connection."""

    _is_unframed = False

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            self._is_unframed = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            self.chunked_encoding = False if self._is_unframed else None
        elif message["type"] == "http.response.body" and self._is_unframed:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def refusal(error: ApiError, path: str) -> bytes:
    """A whole HTTP response, in the shape that clients of `path` know."""
    response = error.response(path)
    body, status = bytes(response.body), response.status_code
    if f"{path}/".startswith(f"{ANTHROPIC_PATH}/"):
        body = msgspec.json.encode(error_body(error.status, error.message, new_id("req_")))
    headers = {
        **error.headers,
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINE[status] + lines.encode("latin-1") + b"\r\n" + body
