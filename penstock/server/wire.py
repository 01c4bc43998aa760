"""HTTP/1.1 on a connection, bounded: what a client may send before it is understood, how long it may take, how long it
may leave its answer unread. A client that has ended its own side still gets the whole answer."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import socket
import termios
from array import array
from collections.abc import Sequence
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.errors import shown
from penstock.server.access import Access
from penstock.server.errors import ApiError
from penstock.server.limits import MAX_HEADER_BYTES, MAX_HEADERS, too_many_headers
from penstock.server.replies import Flow, UnframedCycle, refusal
from penstock.server.seats import Seats, peer_of

log = logging.getLogger("penstock.server")

HEADER_S = 10.0  # for a request's head, from its first byte or from the connection's begin
BODY_S = 30.0  # for a request's body, and a second more for each MIN_BODY_RATE bytes of it
MIN_BODY_RATE = 1024
KEEP_ALIVE_S = 30
UNREAD_S = 60.0  # for a client to take MIN_READ_BYTES of what waits for it
MIN_READ_BYTES = 16 * 1024
LINGER_S = 10.0  # reading on after an early answer: who is cut off while sending never sees it
MAX_DISCARDED = 1 << 28
MAX_PIPELINED = 16
SLICE_BYTES = 64 * 1024  # parsed in one callback of the loop
CHUNK_COST = 16  # a chunked body may be so much larger than its content: one byte a chunk takes 6
SOCKET_BUFFER_BYTES = 256 * 1024  # in the kernel, for one client's unread answer
TCP_CLOSED = 7  # of linux/tcp_states.h
OLD_VERSIONS = ("0.9", "1.0")  # of HTTP, without chunks

IDLE, HEAD, BODY = "idle", "head", "body"  # what of the latest request has come


class _Exit:
    """A transport whose close lets the client finish what it is sending."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        self._connection.leave()


class Connection(HttpToolsProtocol):
    def __init__(
        self,
        config: Config,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._seats: Seats = server_state.seats
        self._access: Access | None = server_state.access
        self._peer = ""
        self._phase = HEAD
        self._since_s = self.loop.time()  # of the phase
        self._has_begun = False  # something of the latest request has come
        self._num_messages = 0
        self._num_headers = 0
        self._num_head_bytes = 0
        self._num_raw_bytes = 0  # of the phase, as far as they came in parts of their own
        self._num_body_bytes = 0
        self._num_discarded = 0
        self._running: RequestResponseCycle | None = None
        self._unfed = b""
        self._refusal: ApiError | None = None
        self._is_repeated = False  # the head that is parsed, without its upgrade
        self._stopped = False  # nothing more is parsed
        self._ended = False  # the client's side
        self._lingering = False
        self._left_s = 0.0  # since when the client should be gone
        self._unread: tuple[int, float] | None = None
        self.was_probed = False

    # the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: Flow = Flow(transport)
        self._peer = peer_of(self.client[0] if self.client else None)
        if not self._seats.take(self, self._peer):
            self._stopped = True
            if self._access is not None:
                self._access.refuse_connection("seats")
            transport.write(
                refusal(
                    ApiError(
                        503,
                        "the server has no more connections to give: close some, or try again",
                        headers={"Retry-After": "1"},
                    ),
                    "",
                )
            )
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._seats.leave(self, self._peer)
        self._unfed, self._stopped = b"", True
        self.pipeline.clear()
        if self._running is not None and self._running is not self.cycle:
            self._running.disconnected = not self._running.response_complete
            self._running.message_event.set()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    @property
    def is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    @property
    def is_waiting(self) -> bool:
        return not self.is_answering

    def drop(self) -> None:
        self.transport.abort()

    def leave(self) -> None:
        """Close, once the client has stopped sending."""
        if self._phase != BODY or self._ended or self.transport.is_closing():
            return self.transport.close()
        self._linger()

    def _linger(self) -> None:
        self._lingering, self._left_s = True, self.loop.time()
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()

    def eof_received(self) -> bool:  # type: ignore[override]
        self._ended = True
        return self.scheme == "http" and (bool(self._unfed) or self._end())

    def _end(self) -> bool:
        """The client sends nothing more; keep the connection if it is owed an answer."""
        if self._lingering or not self.is_answering:
            return False
        if self._phase == BODY and not self._stopped:
            self._refuse(ApiError(400, "the body was cut off"))
        else:
            self._close_after_answers()
        return self.is_answering

    # what comes

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
            self._refusal = self._refusal or ApiError(400, "this is no valid HTTP request", code="invalid_http")
        if self._refusal is None and before == (self._num_messages, self._phase):
            self._num_raw_bytes += len(data)
            self._check_raw()
        if self._refusal is not None:
            self._refuse(self._refusal)

    def _parse(self, data: bytes) -> None:
        """Parse as if no upgrade had been asked for: where one is, a new parser takes the message's body and on."""
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
        """Bound what the parser takes without a word: a header, a chunk's extension or trailers without end."""
        if self._phase == HEAD and self._num_raw_bytes > MAX_HEADER_BYTES:
            self._refusal = too_many_headers()
        elif self._phase == BODY and self._num_raw_bytes > MAX_HEADER_BYTES + CHUNK_COST * self._num_body_bytes:
            self._refusal = ApiError(
                400, "the chunks of the body have more around them than in them", code="invalid_http"
            )

    def _enter(self, phase: str) -> None:
        self._phase, self._since_s, self._num_raw_bytes = phase, self.loop.time(), 0

    # the parser's calls

    def on_message_begin(self) -> None:
        if self._stopped or self._refusal is not None or self._is_repeated:
            return
        super().on_message_begin()
        self._enter(HEAD)
        self._has_begun = True
        self._num_messages += 1
        self._num_headers = self._num_head_bytes = self._num_body_bytes = 0

    def on_url(self, url: bytes) -> None:
        if not self._is_repeated and self._counted(len(url)):
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_repeated:
            return
        self._num_headers += 1
        if self._counted(len(name) + len(value)) and self._phase == HEAD:  # trailers are no headers
            super().on_header(name, value)

    def _counted(self, num_bytes: int) -> bool:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEADER_BYTES or self._num_headers > MAX_HEADERS:
            self._refusal = self._refusal or too_many_headers()
        return self._refusal is None and not self._stopped

    def on_headers_complete(self) -> None:
        if self._stopped or self._refusal is not None or self._is_repeated:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            return self._close_after_answers()
        self._refusal = _unknown_coding(self.headers)
        if self._refusal is not None:
            return
        authority = self._take_authority()
        super().on_headers_complete()
        if self.scope["http_version"] in OLD_VERSIONS:
            self.cycle.__class__ = UnframedCycle
            self.cycle.keep_alive = self.cycle.waiting_for_100_continue = False
        if authority is not None:
            self.scope["authority"] = authority  # type: ignore[typeddict-unknown-key]
        self.cycle.transport = _Exit(self)  # type: ignore[assignment]
        self._enter(BODY)

    def _take_authority(self) -> bytes | None:
        """Take the host out of a target that names one (`GET http://host/path`): it stands before the Host header."""
        if self.url.startswith(b"/") or self.url == b"*":
            return None
        target = httptools.parse_url(self.url)
        query = b"?" + target.query if target.query else b""
        self.url = (target.path or b"/") + query
        port = b":%d" % target.port if target.port else b""
        host = target.host or b""
        return (b"[" + host + b"]" if b":" in host else host) + port

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

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

    def on_response_complete(self) -> None:
        self._left_s = self.loop.time()
        super().on_response_complete()
        if self._stopped and not self.is_answering and not self._lingering:
            self.transport.close()

    # what is not taken

    def _refuse(self, error: ApiError) -> None:
        """Answer in place of the app, unless an earlier answer is under way: then that is the last."""
        own_begun = self._running is self.cycle and self._phase == BODY
        unanswered = own_begun and self.cycle is not None and not self.cycle.response_started
        if self.is_answering and not unanswered:
            return self._close_after_answers()
        self._stopped = True
        if unanswered:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.is_closing():
            return
        path = self.url.partition(b"?")[0].decode("latin-1") if self._num_messages else ""
        if self._access is not None:
            self._access.refuse(
                self.client,
                path,
                error.status,
                self.loop.time() - self._since_s,
                self.cycle.scope if unanswered else None,
            )  # type: ignore[arg-type]
        self.transport.write(refusal(error, path))
        if self._ended:
            self.transport.close()
        else:
            self._linger()

    def _close_after_answers(self) -> None:
        """Parse nothing more; what has come whole is answered."""
        self._stopped = True
        if self._phase == BODY and self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()
        last = self.pipeline[0][0] if self.pipeline else self._running
        if last is not None and not last.response_complete:
            last.keep_alive = False
        elif not self.is_answering:
            self.transport.close()

    # what takes too long

    def check(self, now_s: float) -> None:
        """Called about once a second."""
        self._check_unread(now_s)
        if self._lingering:
            if now_s - self._left_s > LINGER_S:
                self.transport.abort()
        elif self.transport.is_closing() or self._stopped:
            pass
        elif self._phase == HEAD and not self.is_answering and now_s - self._since_s > HEADER_S:
            if self._has_begun:
                self._refuse(_late("head", HEADER_S))
            else:
                self.transport.close()
        elif self._phase == BODY:
            self._check_body(now_s)

    def _check_body(self, now_s: float) -> None:
        if self.cycle.response_complete:
            if now_s - self._left_s > LINGER_S:
                self.transport.close()
        elif self.flow.read_paused:
            self._since_s = now_s - self._num_body_bytes / MIN_BODY_RATE  # it is our turn to read
        elif now_s - self._since_s > BODY_S + self._num_body_bytes / MIN_BODY_RATE:
            self._refuse(_late("body", BODY_S))

    def _check_unread(self, now_s: float) -> None:
        """Drop a client that does not read what waits for it."""
        num_bytes = self._num_unread()
        if not num_bytes or not (self.flow.write_paused or self.transport.is_closing() or self._lingering):
            self._unread = None
        elif self._unread is None or num_bytes <= self._unread[0] - min(MIN_READ_BYTES, self._unread[0]):
            self._unread = num_bytes, now_s
        elif now_s - self._unread[1] > UNREAD_S:
            log.info("a client of %s took nothing of its answer for %g s: it is dropped", self._peer, UNREAD_S)
            self.transport.abort()

    def _num_unread(self) -> int:
        """Bytes that wait here and in the kernel: it takes more only when a good part of its own have gone."""
        queued = array("i", [0])
        with contextlib.suppress(OSError, AttributeError):
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self.transport.get_write_buffer_size() + queued[0]

    # whether a client that ended its side is still there

    @property
    def is_in_doubt(self) -> bool:
        """It closed its side, and nothing is written to it that could fail."""
        return self._ended and self.is_answering and not self._running.response_started  # type: ignore[union-attr]

    def check_reset(self) -> None:
        """Nobody reads a socket whose other side has ended, so a reset of it is looked for."""
        line = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError, AttributeError):
            if line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSED:
                self.transport.abort()

    def probe(self) -> None:
        """Write what every HTTP/1.1 client skips: one that is gone resets the connection."""
        if not self.was_probed and self.scope["http_version"] == "1.1":
            self.was_probed = True
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _unknown_coding(headers: Sequence[tuple[bytes, bytes]]) -> ApiError | None:
    """Refuse a transfer coding other than chunked: the parser would pass the coded bytes on as the body."""
    given = b", ".join(value for name, value in headers if name == b"transfer-encoding")
    if given.strip().lower() in (b"", b"chunked"):
        return None
    return ApiError(
        501,
        f"Transfer-Encoding: {shown(given.decode('latin-1'))} is not understood: send the body plain, "
        "chunked or with its Content-Length",
        code="unknown_transfer_encoding",
    )


def _late(part: str, seconds: float) -> ApiError:
    return ApiError(408, f"the request's {part} did not come within {seconds:g} s", code="timeout")
