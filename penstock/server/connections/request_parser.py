"""Parse HTTP/1.1 requests from a connection, with bounds on heads, chunks and pipelining."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import httptools
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from penstock.errors import quote
from penstock.server.anthropic.errors import PATH as ANTHROPIC_PATH
from penstock.server.anthropic.errors import make_error_body
from penstock.server.connections.cycle_body import CycleBody
from penstock.server.http.context import OPEN_BODY, new_id
from penstock.server.http.errors import ApiError

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

MAX_HEADERS = 128
MAX_HEADER_BYTES = 64 * 1024
MAX_LENGTH_DIGITS = 15
UPLOADS = "/v1/files"
MAX_DISCARDED = 1 << 28  # bytes read and dropped after an early response
MAX_PIPELINED = 16
SLICE_BYTES = 64 * 1024  # parsed per event loop callback
CHUNK_COST = 16  # max raw bytes per body byte of a chunked body; one-byte chunks take 6
OLD_VERSIONS = ("0.9", "1.0")  # HTTP versions without chunked responses
IDLE, HEAD, BODY = "idle", "head", "body"  # how much of the latest request has arrived


class BufferedFlow(FlowControl):
    """Flow control that also pauses reading while received bytes wait to be parsed."""

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
    """A response to an HTTP/1.0 client: without a Content-Length it ends with the connection."""

    _is_unframed = False

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            self._is_unframed = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            self.chunked_encoding = False if self._is_unframed else None
        elif message["type"] == "http.response.body" and self._is_unframed:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def encode_refusal(error: ApiError, path: str) -> bytes:
    """Encode `error` as a whole HTTP response in the format of the API at `path`."""
    response = error.response(path)
    body, status = bytes(response.body), response.status_code
    if f"{path}/".startswith(f"{ANTHROPIC_PATH}/"):
        body = msgspec.json.encode(make_error_body(error.status, error.message, new_id("req_")))
    headers = {
        **error.headers,
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINE[status] + lines.encode("latin-1") + b"\r\n" + body


class CheckMiddleware:
    """Middleware that responds with the error `check` finds in a request, if any."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], ApiError | None]) -> None:
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._check(scope) if scope["type"] == "http" else None
        if error is not None:
            return await error.response(scope["path"])(scope, receive, send)
        await self._app(scope, receive, send)


class Limits:
    """Middleware that bounds headers and bodies. It responds early; the connection lingers so that the client sees
    it."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, max_upload_bytes: int | None = None) -> None:
        """Make the middleware; `max_upload_bytes` bounds bodies that are streamed to disk."""
        self._app, self._max_body_bytes = app, max_body_bytes
        self._max_upload_bytes = max_body_bytes if max_upload_bytes is None else max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        error = self._find_error(scope)
        if error is not None:
            return await error.response(scope["path"])(scope, receive, send)
        num_bytes, max_bytes = 0, self._max_bytes(scope)

        async def count() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise self._too_large(scope)
            return message

        await self._app(scope, count, send)

    def _find_error(self, scope: Scope) -> ApiError | None:
        headers = scope["headers"]
        if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            return too_many_headers()
        for name, value in headers:
            length = value.strip().lstrip(b"0") if name == b"content-length" else b""
            if length.isdigit() and (len(length) > MAX_LENGTH_DIGITS or int(length) > self._max_bytes(scope)):
                return self._too_large(scope)
            if name == b"content-encoding" and {one.strip().lower() for one in value.split(b",")} - {b"", b"identity"}:
                return ApiError(
                    415,
                    f"Content-Encoding: {quote(value.decode('latin-1'))} is not supported: send the body uncompressed",
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


def too_many_headers() -> ApiError:
    return ApiError(
        431,
        f"too many headers: the limit is {MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes "
        "in all; send fewer or shorter ones",
        code="headers_too_large",
        headers={"Connection": "close"},
    )


class LingeringTransport:
    """A transport whose close lets the client finish sending."""

    def __init__(self, transport: asyncio.Transport, leave: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, leave


class RequestParser(HttpToolsProtocol):
    """The receiving half of a connection. `Connection` decides what an error or an end of input leads to."""

    flow: BufferedFlow

    def __init__(
        self,
        config: Config,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._phase = HEAD
        self._since_s = self.loop.time()  # start of the phase
        self._has_begun = False  # bytes of the latest request have arrived
        self._num_messages = 0
        self._num_headers = 0
        self._num_head_bytes = 0
        self._num_raw_bytes = 0  # in this phase, without a parser callback
        self._num_body_bytes = 0
        self._num_discarded = 0
        self._unfed = b""
        self._refusal: ApiError | None = None
        self._is_repeated = False  # the head is parsed again without its Upgrade header
        self._stopped = False  # nothing more is parsed
        self._ended = False  # the client has closed its side
        self._lingering = False

    @abstractmethod
    def leave(self) -> None:
        """Close once the client has stopped sending."""

    @abstractmethod
    def _refuse(self, error: ApiError) -> None:
        """Respond in place of the app."""

    @abstractmethod
    def _end(self) -> bool:
        """Handle the client's end of input; True to keep the connection open."""

    @abstractmethod
    def _close_after_answers(self) -> None:
        """Parse nothing more; finish the requests that are complete."""

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._stopped or self._lingering:
            return self._discard(len(data))
        if self._unfed:
            self._unfed += data
        else:
            self._feed(data)

    def _discard(self, num_bytes: int) -> None:
        self._num_discarded += num_bytes
        if self._num_discarded > MAX_DISCARDED:
            self.transport.abort()

    def _feed(self, data: bytes) -> None:
        if len(data) > SLICE_BYTES:
            self._unfed, data = data[SLICE_BYTES:], data[:SLICE_BYTES]
            self.flow.hold()
            self.loop.call_soon(self._feed_rest)
        if self._phase == IDLE:
            self._enter(HEAD)
        self._has_begun = True
        before = (self._num_messages, self._phase)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refusal = self._refusal or ApiError(400, "invalid HTTP request", code="invalid_http")
        if self._refusal is None and before == (self._num_messages, self._phase):
            self._num_raw_bytes += len(data)
            self._check_raw()
        if self._refusal is not None:
            self._refuse(self._refusal)

    def _parse(self, data: bytes) -> None:
        """Parse as if no upgrade had been requested: a new parser takes the rest of the message after one."""
        while True:
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            if self._stopped or self._refusal is not None:
                return
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            kept = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
            self._is_repeated = True
            self.parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *kept, b"\r\n"]))
            self._is_repeated = False

    def _feed_rest(self) -> None:
        data, self._unfed = self._unfed, b""
        if not self._stopped and not self._lingering:
            self._feed(data)
        if self._unfed or self.transport.is_closing():
            return
        self.flow.release()
        if self._ended and not self._end():
            self.transport.close()

    def _check_raw(self) -> None:
        """Bound what the parser swallows silently: an endless header, chunk extension or trailer."""
        if self._phase == HEAD and self._num_raw_bytes > MAX_HEADER_BYTES:
            self._refusal = too_many_headers()
        elif self._phase == BODY and self._num_raw_bytes > MAX_HEADER_BYTES + CHUNK_COST * self._num_body_bytes:
            self._refusal = ApiError(400, "the body's chunks have more overhead than content", code="invalid_http")

    def _enter(self, phase: str) -> None:
        self._phase, self._since_s, self._num_raw_bytes = phase, self.loop.time(), 0

    def on_message_begin(self) -> None:
        if self._stopped or self._refusal is not None or self._is_repeated:
            return
        super().on_message_begin()
        self._enter(HEAD)
        self._has_begun = True
        self._num_messages += 1
        self._num_headers = self._num_head_bytes = self._num_body_bytes = 0

    def on_url(self, url: bytes) -> None:
        if not self._is_repeated and self._count_head(len(url)):
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_repeated:
            return
        self._num_headers += 1
        if self._count_head(len(name) + len(value)) and self._phase == HEAD:  # not a trailer
            super().on_header(name, value)

    def _count_head(self, num_bytes: int) -> bool:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEADER_BYTES or self._num_headers > MAX_HEADERS:
            self._refusal = self._refusal or too_many_headers()
        return self._refusal is None and not self._stopped

    def on_headers_complete(self) -> None:
        if self._stopped or self._refusal is not None or self._is_repeated:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            return self._close_after_answers()
        self._refusal = check_transfer_encoding(self.headers)
        if self._refusal is not None:
            return
        authority = self._take_authority()
        super().on_headers_complete()
        if self.scope["http_version"] in OLD_VERSIONS:
            self.cycle.__class__ = UnframedCycle
            self.cycle.keep_alive = self.cycle.waiting_for_100_continue = False
        if authority is not None:
            self.scope["authority"] = authority  # type: ignore[typeddict-unknown-key]
        self.cycle.transport = LingeringTransport(self.transport, self.leave)  # type: ignore[assignment]
        self.scope[OPEN_BODY] = CycleBody(self.cycle)  # type: ignore[literal-required]
        self._enter(BODY)

    def _take_authority(self) -> bytes | None:
        """Split the host off an absolute-form target (`GET http://host/path`); it overrides the Host header."""
        if self.url.startswith(b"/") or self.url == b"*":
            return None
        target = httptools.parse_url(self.url)
        query = b"?" + target.query if target.query else b""
        self.url = (target.path or b"/") + query
        port = b":%d" % target.port if target.port else b""
        host = target.host or b""
        return (b"[" + host + b"]" if b":" in host else host) + port

    def on_body(self, body: bytes) -> None:
        if self._stopped or self._refusal is not None:
            return
        self._num_body_bytes += len(body)
        if self.cycle.response_complete:
            self._discard(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._stopped or self._refusal is not None or self.parser.should_upgrade():
            return
        self._enter(IDLE)
        self._has_begun = False
        super().on_message_complete()


def check_transfer_encoding(headers: Sequence[tuple[bytes, bytes]]) -> ApiError | None:
    """Return an error for any transfer coding but chunked: the parser would pass the coded bytes through."""
    given = b", ".join(value for name, value in headers if name == b"transfer-encoding")
    if given.strip().lower() in (b"", b"chunked"):
        return None
    return ApiError(
        501,
        f"Transfer-Encoding: {quote(given.decode('latin-1'))} is not supported: send the body plain, "
        "chunked or with its Content-Length",
        code="unknown_transfer_encoding",
    )
