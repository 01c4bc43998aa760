"""HTTP/1.1 as cheaply as it goes: while a server is measured, bytes and their times are noted and nothing is read.

The client shares the cores with the server, so what it spends per token counts: see "Serving" in docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from dataclasses import dataclass
from functools import cache
from typing import Any, cast
from urllib.parse import urlsplit

LAST_CHUNK = b"\r\n0\r\n\r\n"
HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True)
class Target:
    """Where a server listens. `address` is looked up once."""

    url: str
    host: str
    port: int
    path: str
    secure: bool
    address: str
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Target:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server: write http://HOST:PORT")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            address = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)[0][4][0]
        except OSError as error:
            raise ValueError(f"{parts.hostname!r} of {url!r} cannot be looked up: {error}") from error
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(url, parts.hostname, port, path, parts.scheme == "https", str(address), api_key)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        lines = [
            f"{method} {self.path}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join(lines).encode() + HEAD_END + body


class Exchange(asyncio.Protocol):
    """A request, and the bytes that came back with the time of each arrival."""

    def __init__(self, request: bytes, due: float | None = None) -> None:
        self.request = request
        self.sent = time.perf_counter()
        self.begin = self.sent if due is None else due  # latencies count from here
        self.arrivals: list[tuple[float, bytes]] = []
        self.failure: str | None = None
        self.done = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._tail = b""
        self._left: int | None = None  # bytes of the body, where the head tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.arrivals.append((time.perf_counter(), data))
        if HEAD_END not in self._head:
            self._head += data
            self._left = _body_left(self._head)
        elif self._left is not None:
            self._left -= len(data)
        self._tail = (self._tail + data)[-len(LAST_CHUNK) :]
        if self._tail == LAST_CHUNK or self._left == 0:
            self.finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self.finish(str(exc) or type(exc).__name__ if exc else None)

    def finish(self, failure: str | None = None) -> None:
        if not self.done.done():
            self.failure = failure
            self.done.set_result(None)
            if self._transport:
                self._transport.close()


def _body_left(head: bytes) -> int | None:
    lines, end, body = head.partition(HEAD_END)
    lengths = [line for line in lines.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return int(lengths[0].partition(b":")[2]) - len(body) if end and lengths else None


async def exchange(target: Target, request: bytes, timeout_s: float, due: float | None = None) -> Exchange:
    """Never raises for what the server or the network does: `failure` says it."""
    made = Exchange(request, due)
    loop = asyncio.get_running_loop()
    timer = loop.call_later(timeout_s, made.finish, "timeout")
    secure: dict[str, Any] = {"ssl": _trust(), "server_hostname": target.host} if target.secure else {}
    try:
        connecting = loop.create_connection(lambda: made, target.address, target.port, **secure)
        await asyncio.wait_for(connecting, timeout_s)
        await made.done
    except (OSError, asyncio.TimeoutError) as error:
        made.finish("timeout" if isinstance(error, asyncio.TimeoutError) else f"cannot connect: {error}")
    finally:
        timer.cancel()
    return made


@cache
def _trust() -> ssl.SSLContext:
    return ssl.create_default_context()


def fetch(target: Target, path: str, body: Any = None, timeout_s: float = 10.0) -> tuple[int | None, Any]:
    """Status and JSON value of one plain request; None where there is none."""
    from bench.load.stream import Response

    method = "GET" if body is None else "POST"
    request = target.request(method, path, b"" if body is None else json.dumps(body).encode())
    response = Response.read(asyncio.run(_fetch(target, request, timeout_s)))
    try:
        return response.status, json.loads(b"".join(piece for _, piece in response.pieces))
    except ValueError:
        return response.status, None


async def _fetch(target: Target, request: bytes, timeout_s: float) -> Exchange:
    return await exchange(target, request, timeout_s)
