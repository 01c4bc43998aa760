"""Requests to an upstream server: HTTP/1.1 over kept connections, with bounded buffers."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from penstock.errors import InvalidConfig, PenstockError, quote

CONNECT_S = 5.0
READ_BYTES = 64 * 1024
MAX_HEAD_BYTES = 64 * 1024
MAX_IDLE = 64  # connections kept per server
Headers = list[tuple[bytes, bytes]]


class UpstreamFailed(PenstockError):
    """A server that cannot be reached, breaks off or sends what is no HTTP."""


@dataclass(frozen=True)
class Address:
    """Parts of a server's URL."""

    url: str
    host: str
    port: int
    is_tls: bool
    prefix: str  # of every path

    @classmethod
    def parse(cls, url: str) -> Address:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or parts.scheme not in ("http", "https") or parts.query or parts.fragment or parts.username:
            raise InvalidConfig(f"{quote(url)} is no server's URL: give it as http://HOST:PORT or https://HOST:PORT")
        is_tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(url.rstrip("/"), host, port or (443 if is_tls else 80), is_tls, prefix)

    @property
    def authority(self) -> bytes:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"{name}:{self.port}".encode()


class _Connection:
    """One connection, and the parser of the response under way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.is_broken = self.is_half_sent = False
        self._begin()

    def _begin(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.headers: Headers = []
        self.status = 0
        self.has_head = self.is_complete = self.has_more = self.stays_open = False
        self.parts: deque[bytes] = deque()
        self.num_head_bytes = 0

    def on_message_begin(self) -> None:
        self.has_more = self.is_complete  # an unsolicited response

    def on_header(self, name: bytes, value: bytes) -> None:
        self.num_head_bytes += len(name) + len(value)
        if not self.has_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.has_more:
            return
        self.status = int(self.parser.get_status_code())
        self.has_head = not 100 <= self.status < 200
        if not self.has_head:
            self.headers.clear()

    def on_body(self, body: bytes) -> None:
        if not self.has_more:
            self.parts.append(body)

    def on_message_complete(self) -> None:
        if self.has_head and not self.is_complete:
            self.is_complete, self.stays_open = True, self.parser.should_keep_alive()  # it forgets that afterwards

    @property
    def ends_with_connection(self) -> bool:
        names = {name for name, _ in self.headers}
        return not names & {b"content-length", b"transfer-encoding"}

    @property
    def is_reusable(self) -> bool:
        ended = self.is_complete and not (self.has_more or self.parts or self.is_half_sent)
        return ended and self.stays_open and not self.reader.at_eof()

    @property
    def is_quiet(self) -> bool:
        """True if the server has sent nothing, and has not closed the connection, since its last response."""
        reading = self.reader.read(1)
        try:
            reading.send(None)
        except (StopIteration, OSError):
            return False
        reading.close()
        return not self.writer.is_closing()

    def reset(self) -> None:
        self._begin()

    async def write(self, head: bytes, body: Sequence[bytes] | AsyncIterator[bytes]) -> None:
        """Write a request, its body in chunks if it comes piecemeal."""
        self.writer.write(head)
        if isinstance(body, AsyncIterator):
            async for part in body:
                if part:
                    self.writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                    await self.writer.drain()
            self.writer.write(b"0\r\n\r\n")
        else:
            for part in body:
                self.writer.write(part)
        await self.writer.drain()

    async def feed(self) -> None:
        """Read and parse some bytes."""
        try:
            data = await self.reader.read(READ_BYTES)
        except OSError as error:
            raise UpstreamFailed(f"the connection broke: {error}") from None
        if not data:
            if self.has_head and self.ends_with_connection and not self.is_broken:
                self.is_complete = True
                return
            raise UpstreamFailed("the connection was closed before the end of the response")
        if not self.has_head:
            self.num_head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise UpstreamFailed("it wants another protocol than HTTP") from None
        except httptools.HttpParserError as error:
            raise UpstreamFailed(f"it sent what is no HTTP response ({error})") from None
        if self.has_head and not 200 <= self.status < 600:
            raise UpstreamFailed(f"it sent a response with status {self.status}")
        if not self.has_head and self.num_head_bytes > MAX_HEAD_BYTES:
            raise UpstreamFailed(f"the head of its response has more than {MAX_HEAD_BYTES} bytes")

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.writer.transport.abort()


class UpstreamResponse:
    """A response whose head has come."""

    def __init__(self, client: UpstreamClient, connection: _Connection) -> None:
        self._client, self._connection = client, connection
        self.status, self.headers = connection.status, list(connection.headers)

    @property
    def ends_with_connection(self) -> bool:
        """True if nothing but the connection's end tells that the body is complete."""
        return self._connection.ends_with_connection

    def find(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body; UpstreamFailed if it breaks off."""
        connection = self._connection
        while True:
            while connection.parts:
                yield connection.parts.popleft()
            if connection.is_complete:
                return
            await connection.feed()

    async def read(self, max_bytes: int) -> bytes:
        """Read the whole body; UpstreamFailed if it is larger."""
        body = bytearray()
        async for part in self.parts():
            body += part
            if len(body) > max_bytes:
                raise UpstreamFailed(f"its response has more than {max_bytes} bytes")
        return bytes(body)

    def close(self) -> None:
        """Keep the connection if the response has ended, else close it."""
        self._client.give_back(self._connection)


class UpstreamClient:
    """Connections to one server."""

    def __init__(self, address: Address, context: ssl.SSLContext | None) -> None:
        self.address = address
        self._context = context if address.is_tls else None
        self._idle: deque[_Connection] = deque()
        self._busy: set[_Connection] = set()

    async def send(
        self, method: str, target: bytes, headers: Headers, body: Sequence[bytes] | AsyncIterator[bytes] = ()
    ) -> UpstreamResponse:
        """Send a request; return when the head of the response has come."""
        while True:
            kept = self._take()
            connection = kept or await self._connect()
            self._busy.add(connection)
            try:
                await self._exchange(connection, self._encode_head(method, target, headers, body), body)
                return UpstreamResponse(self, connection)
            except (UpstreamFailed, OSError) as error:
                self._drop(connection)
                is_fresh = kept is None or connection.num_head_bytes or isinstance(body, AsyncIterator)
                if is_fresh:  # else the server may have closed a kept connection just now
                    raise UpstreamFailed(str(error)) from None
            except BaseException:
                self._drop(connection)
                raise

    async def _exchange(
        self, connection: _Connection, head: bytes, body: Sequence[bytes] | AsyncIterator[bytes]
    ) -> None:
        """Send a request and read the head of its response, which may come before all is sent: what is left then is
        not."""
        sending = asyncio.ensure_future(connection.write(head, body))
        sending.add_done_callback(lambda ended: None if _find_error(ended) is None else connection.close())
        try:
            while not connection.has_head:
                await connection.feed()
        except UpstreamFailed:
            error = _find_error(sending)
            if error is not None and not isinstance(error, OSError):
                raise error from None  # of who makes the body
            raise
        finally:
            connection.is_half_sent = not sending.done()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    def _encode_head(
        self, method: str, target: bytes, headers: Headers, body: Sequence[bytes] | AsyncIterator[bytes]
    ) -> bytes:
        lines = [method.encode(), b" ", self.address.prefix.encode(), target, b" HTTP/1.1\r\nhost: "]
        lines += [self.address.authority, b"\r\n"]
        for name, value in headers:
            lines += [name, b": ", value, b"\r\n"]
        if isinstance(body, AsyncIterator):
            lines.append(b"transfer-encoding: chunked\r\n")
        elif body or method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d\r\n" % sum(map(len, body)))
        return b"".join([*lines, b"\r\n"])

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_quiet:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        address = self.address
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(address.host, address.port, ssl=self._context, limit=READ_BYTES), CONNECT_S
            )
        except (OSError, asyncio.TimeoutError) as error:
            reason = getattr(error, "strerror", None) or str(error) or f"no answer in {CONNECT_S:g} s"
            raise UpstreamFailed(f"cannot connect: {reason}") from None
        return _Connection(reader, writer)

    def _drop(self, connection: _Connection) -> None:
        self._busy.discard(connection)
        connection.close()

    def break_all(self) -> None:
        """Give up what the server is asked now: it does not answer any more."""
        for connection in list(self._busy):
            connection.is_broken = True
            connection.close()
        self.close()

    def give_back(self, connection: _Connection) -> None:
        self._busy.discard(connection)
        if connection.is_reusable and len(self._idle) < MAX_IDLE:
            connection.reset()
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _find_error(task: asyncio.Future[None]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None
