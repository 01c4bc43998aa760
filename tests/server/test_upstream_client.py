"""The router's connections to servers that answer early, twice, unasked, or with what is no status."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import pytest

from penstock.server.router.forward import drop_hops
from penstock.server.router.http_client import Address, UpstreamClient, UpstreamFailed
from penstock.server.router.upstream import Upstream

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Value = TypeVar("Value")


def run(serve: Serve, ask: Callable[[Upstream], Awaitable[Value]]) -> Value:
    """Ask a scripted server."""

    async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    async def both() -> Value:
        server = await asyncio.start_server(serve_and_close, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            upstream = Upstream(0, Address.parse(f"http://127.0.0.1:{port}"), None, [])
            try:
                return await asyncio.wait_for(ask(upstream), 20)
            finally:
                upstream.close()
                await asyncio.sleep(0.01)  # until both ends are closed

    return asyncio.run(both())


async def read_head(reader: asyncio.StreamReader) -> bytes:
    """Read a request without a body; empty at the connection's end."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        return await reader.readuntil(b"\r\n\r\n")
    return b""


async def get(client: UpstreamClient, path: bytes = b"/") -> tuple[int, bytes]:
    response = await client.send("GET", path, [])
    try:
        return response.status, await response.read(1000)
    finally:
        response.close()


@pytest.mark.parametrize("is_chunked", [False, True])
def test_answer_before_the_end_of_the_body(is_chunked: bool) -> None:
    """A refusal of a large body is an answer, not the loss of a server."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"x" * (1 << 17)

    async def ask(upstream: Upstream) -> tuple[int, bytes]:
        client = upstream.client
        response = await client.send("POST", b"/", [], chunks() if is_chunked else [b"x" * (16 << 20)])
        found = response.status, await response.read(1000)
        response.close()
        assert not client._idle, "half a request was sent on this connection"
        return found

    assert run(serve, ask) == (401, b"no")


def test_error_of_who_makes_the_body() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"x"
        raise KeyError("the client left")

    async def ask(upstream: Upstream) -> None:
        await upstream.client.send("POST", b"/", [], chunks())

    with pytest.raises(KeyError, match="the client left"):
        run(serve, ask)


def test_unasked_answer_is_nobodys() -> None:
    """Some servers say 408 before they close a kept connection: the next request does not get that."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await asyncio.sleep(0.02)
        writer.write(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async def ask(upstream: Upstream) -> list[tuple[int, bytes]]:
        client = upstream.client
        first = await get(client)
        assert client._idle
        await asyncio.sleep(0.2)
        return [first, await get(client)]

    assert run(serve, ask) == [(200, b"ok")] * 2


def test_second_answer_is_no_part_of_the_first() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while path := await read_head(reader):
            body = path.split()[1]
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n" + body)
            writer.write(b"HTTP/1.1 500 No\r\ncontent-length: 6\r\n\r\nSECRET")

    async def ask(upstream: Upstream) -> list[tuple[int, bytes]]:
        client = upstream.client
        return [await get(client, path) for path in (b"/a", b"/b")]

    assert run(serve, ask) == [(200, b"/a"), (200, b"/b")]


@pytest.mark.parametrize("status", [b"099", b"999"])
def test_status_that_is_none(status: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 " + status + b" Odd\r\ncontent-length: 0\r\n\r\n")

    async def ask(upstream: Upstream) -> None:
        await get(upstream.client)

    with pytest.raises(UpstreamFailed, match=f"status {int(status)}"):
        run(serve, ask)


def test_health_is_asked_again_where_a_proxy_said_404() -> None:
    """While a server restarts, what stands before it may know no route; its model list may need a key."""
    health = [b"404", b"200", b"200"]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await read_head(reader):
            status = health.pop(0) if b"/health/ready" in head else b"401"
            writer.write(b"HTTP/1.1 " + status + b" Some\r\ncontent-length: 0\r\n\r\n")

    async def ask(upstream: Upstream) -> list[bool]:
        found = []
        for _ in range(2):
            await upstream.check(5.0)
            found.append(upstream.is_ready)
        return found

    assert run(serve, ask) == [False, True]


def test_headers_of_one_connection_are_not_passed_on() -> None:
    given = [(b"connection", b"keep-alive, X-Hop"), (b"x-hop", b"1"), (b"te", b"trailers"), (b"x-kept", b"2")]
    assert drop_hops([*given, (b"proxy-authorization", b"Basic x")]) == [(b"x-kept", b"2")]
