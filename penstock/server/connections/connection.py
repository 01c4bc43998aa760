"""Bound one HTTP/1.1 connection: its timeouts, its refusals and its closing. A client that has closed its own side
still gets the whole response."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import socket
import termios
from array import array
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from penstock.server.connections.request_parser import BODY, HEAD, BufferedFlow, RequestParser, encode_refusal
from penstock.server.connections.slots import ConnectionSlots, peer_of
from penstock.server.http.access import AccessLog
from penstock.server.http.errors import ApiError

log = logging.getLogger("penstock.server")

HEADER_S = 10.0  # for a request's head, from its first byte or the connection's start
BODY_S = 30.0  # for a request's body, plus a second per MIN_BODY_RATE bytes
MIN_BODY_RATE = 1024
KEEP_ALIVE_S = 30
UNREAD_S = 60.0  # for a client to read MIN_READ_BYTES of its response
MIN_READ_BYTES = 16 * 1024
LINGER_S = 10.0  # keep reading after an early response: a client cut off while sending never sees it
SOCKET_BUFFER_BYTES = 256 * 1024  # kernel send buffer per connection
TCP_CLOSED = 7  # from linux/tcp_states.h


class Connection(RequestParser):
    """A client's connection: a slot among all connections, and the responses it is owed."""

    def __init__(
        self,
        config: Config,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._slots: ConnectionSlots = server_state.slots
        self._access: AccessLog | None = server_state.access
        self._peer = ""
        self._running: RequestResponseCycle | None = None
        self._left_s = 0.0  # when the last response ended
        self._unread: tuple[int, float] | None = None
        self.was_probed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: BufferedFlow = BufferedFlow(transport)
        self._peer = peer_of(self.client[0] if self.client else None)
        if not self._slots.take(self, self._peer):
            self._stopped = True
            if self._access is not None:
                self._access.refuse_connection("seats")
            transport.write(
                encode_refusal(
                    ApiError(503, "too many open connections: close some, or try again", headers={"Retry-After": "1"}),
                    "",
                )
            )
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._slots.leave(self, self._peer)
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
        """Close once the client has stopped sending."""
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
        """Handle the client's end of input; True to keep the connection for a pending response."""
        if self._lingering or not self.is_answering:
            return False
        if self._phase == BODY and not self._stopped:
            self._refuse(ApiError(400, "the body was cut short"))
        else:
            self._close_after_answers()
        return self.is_answering

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._left_s = self.loop.time()
        super().on_response_complete()
        if self._stopped and not self.is_answering and not self._lingering:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Respond in place of the app; if an earlier response is under way, only close after it."""
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
                self.cycle.scope if unanswered else None,  # type: ignore[arg-type]
            )
        self.transport.write(encode_refusal(error, path))
        if self._ended:
            self.transport.close()
        else:
            self._linger()

    def _close_after_answers(self) -> None:
        """Parse nothing more; finish the requests that are complete."""
        self._stopped = True
        if self._phase == BODY and self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()
        last = self.pipeline[0][0] if self.pipeline else self._running
        if last is not None and not last.response_complete:
            last.keep_alive = False
        elif not self.is_answering:
            self.transport.close()

    def check(self, now_s: float) -> None:
        """Enforce the timeouts; called about once a second."""
        self._check_unread(now_s)
        if self._lingering:
            if now_s - self._left_s > LINGER_S:
                self.transport.abort()
        elif self.transport.is_closing() or self._stopped:
            pass
        elif self._phase == HEAD and not self.is_answering and now_s - self._since_s > HEADER_S:
            if self._has_begun:
                self._refuse(_make_timeout("head", HEADER_S))
            else:
                self.transport.close()
        elif self._phase == BODY:
            self._check_body(now_s)

    def _check_body(self, now_s: float) -> None:
        if self.cycle.response_complete:
            if now_s - self._left_s > LINGER_S:
                self.transport.close()
        elif self.flow.read_paused:
            self._since_s = now_s - self._num_body_bytes / MIN_BODY_RATE  # we paused reading: the client is not late
        elif now_s - self._since_s > BODY_S + self._num_body_bytes / MIN_BODY_RATE:
            self._refuse(_make_timeout("body", BODY_S))

    def _check_unread(self, now_s: float) -> None:
        """Drop a client that does not read its response."""
        num_bytes = _count_unread(self.transport)
        if not num_bytes or not (self.flow.write_paused or self.transport.is_closing() or self._lingering):
            self._unread = None
        elif self._unread is None or num_bytes <= self._unread[0] - min(MIN_READ_BYTES, self._unread[0]):
            self._unread = num_bytes, now_s
        elif now_s - self._unread[1] > UNREAD_S:
            log.info("dropped a client of %s: it read nothing of its response for %g s", self._peer, UNREAD_S)
            self.transport.abort()

    @property
    def is_half_closed(self) -> bool:
        """True if the client closed its side and no write has failed yet: it may be gone."""
        return self._ended and self.is_answering and not self._running.response_started  # type: ignore[union-attr]

    def probe(self) -> None:
        """Abort if the client has reset the connection; else write what every HTTP/1.1 client skips, to provoke one.

        A socket whose other side has ended is never read, so a reset must be looked for.
        """
        with contextlib.suppress(OSError, AttributeError):
            info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
            if info[0] == TCP_CLOSED:
                self.transport.abort()
        if not self.was_probed and self.scope["http_version"] == "1.1":
            self.was_probed = True
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _make_timeout(part: str, seconds: float) -> ApiError:
    return ApiError(408, f"the request's {part} did not arrive within {seconds:g} s", code="timeout")


def _count_unread(transport: asyncio.Transport) -> int:
    """Count the bytes queued here and in the kernel."""
    queued = array("i", [0])
    with contextlib.suppress(OSError, AttributeError):
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
    return transport.get_write_buffer_size() + queued[0]
