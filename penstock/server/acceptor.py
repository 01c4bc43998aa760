"""Taking in connections while there are descriptors for them; the rest are closed as soon as they are accepted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

import uvicorn

from penstock.server.access import Access
from penstock.server.descriptors import max_connections

log = logging.getLogger("penstock.server")

MAX_ACCEPTED_AT_ONCE = 32  # before others get the event loop
HANDSHAKE_S = 10.0
PAUSE_S = 0.2  # when the system itself has no descriptor left
WARN_EVERY_S = 60.0


class Acceptor:
    """Accepts from one listening socket. It is closed and waited for as an asyncio.Server is."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        access: Access | None = None,
    ) -> None:
        self.context = context  # may be exchanged: later connections get the new one
        self._listener, self._make_protocol = listener, make_protocol
        self._loop = asyncio.get_running_loop()
        self._max_connections = max_connections()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._access = access
        self._num_refused = 0
        self._warned_s = -WARN_EVERY_S
        listener.setblocking(False)
        self._resume()

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._warn(f"connections cannot be accepted: {error.strerror}")
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(PAUSE_S, self._resume)
                return
            if connection.fileno() >= self._max_connections:
                connection.close()
                self._num_refused += 1
                if self._access is not None:
                    self._access.refuse_connection("descriptors")
                self._warn(
                    f"{self._num_refused} connections refused: {self._max_connections} files are open; raise "
                    "the limit with `ulimit -n` before the start"
                )
            else:
                task = self._loop.create_task(self._begin(connection))
                self._handshakes.add(task)
                task.add_done_callback(self._handshakes.discard)

    async def _begin(self, connection: socket.socket) -> None:
        """Hand the connection to a protocol, after the handshake where there is one. A client that fails it is gone."""
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        options: dict[str, Any] = {"ssl_handshake_timeout": HANDSHAKE_S} if self.context else {}
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection, ssl=self.context, **options)
        except (OSError, asyncio.TimeoutError):  # also ssl.SSLError
            connection.close()
        except BaseException:
            connection.close()
            raise

    def _warn(self, message: str) -> None:
        if time.monotonic() - self._warned_s >= WARN_EVERY_S:
            self._warned_s = time.monotonic()
            log.warning("%s", message)

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        for task in self._handshakes:
            task.cancel()

    async def wait_closed(self) -> None:
        return


class AcceptingServer(uvicorn.Server):
    """Uvicorn with the accepting done here, and with signals left to others."""

    def __init__(self, config: uvicorn.Config, context: ssl.SSLContext | None, access: Access | None = None) -> None:
        super().__init__(config)
        self._context, self._access = context, access
        self._acceptors: list[Acceptor] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._acceptors = [
            Acceptor(listener, self._make_protocol, self._context, self._access) for listener in sockets or []
        ]
        self.servers += self._acceptors  # type: ignore[arg-type]

    def _make_protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    def use_certificates(self, context: ssl.SSLContext | None) -> None:
        """For connections from now on."""
        self._context = context
        for acceptor in self._acceptors:
            acceptor.context = context
