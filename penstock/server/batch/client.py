"""Calling the application in its own process."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message

from penstock.server.context import IDENTITY, Client


class LocalClient:
    """`client` is who asks; without one, the application finds out as for any request."""

    def __init__(self, app: ASGIApp, client: Client | None = None) -> None:
        self._app = app
        self._identity = {} if client is None else {IDENTITY: client}

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the whole response. Cancelling it is the client's going away."""
        unread = [body]
        status, parts = 500, []

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await asyncio.Event().wait()  # until the call is cancelled
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self._app(_scope(path, len(body)) | self._identity, receive, send)
        return status, b"".join(parts)


def _scope(path: str, num_bytes: int) -> dict[str, Any]:
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(num_bytes).encode()),
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
    }
