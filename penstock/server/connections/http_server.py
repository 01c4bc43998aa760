"""The HTTP server: uvicorn with bounded connections that are checked every second."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from penstock.server.connections.connection import KEEP_ALIVE_S, SOCKET_BUFFER_BYTES, Connection
from penstock.server.connections.slots import ConnectionSlots, max_connections
from penstock.server.http.access import AccessLog

log = logging.getLogger("penstock.server")
MAX_ACCEPTED_AT_ONCE = 32  # before yielding to the event loop
HANDSHAKE_S = 10.0
PAUSE_S = 0.2  # when the system is out of descriptors
WARN_EVERY_S = 60.0
TICKS_PER_SWEEP = 10  # uvicorn ticks every 0.1 s
TICKS_PER_PROBE = 5
Endpoints = tuple[str, int, str, int]  # remote address and port, local address and port


class Acceptor:
    """Accept from one listening socket, with the interface of asyncio.Server."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        access: AccessLog | None = None,
    ) -> None:
        self.context = context  # replaced on reload, for new connections
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
                self._warn(f"cannot accept connections: {error.strerror}")
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(PAUSE_S, self._resume)
                return
            if connection.fileno() >= self._max_connections:
                connection.close()
                self._num_refused += 1
                if self._access is not None:
                    self._access.refuse_connection("descriptors")
                self._warn(
                    f"refused {self._num_refused} connections: {self._max_connections} files are open; raise "
                    "the limit with `ulimit -n` before starting the server"
                )
            else:
                task = self._loop.create_task(self._begin(connection))
                self._handshakes.add(task)
                task.add_done_callback(self._handshakes.discard)

    async def _begin(self, connection: socket.socket) -> None:
        """Hand `connection` to a protocol, after the TLS handshake if there is one; drop a client that fails it."""
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


class HttpServerState(ServerState):
    def __init__(self, access: AccessLog | None) -> None:
        super().__init__()
        self.access = access
        max_open = max_connections()
        # fewer than the acceptor takes, so that idle connections are replaced before any is refused
        self.slots = ConnectionSlots(max_open - max_open // 8)


class HttpServer(uvicorn.Server):
    """Uvicorn with bounded connections, accepted through `Acceptor`; signals are left alone."""

    def __init__(self, config: uvicorn.Config, context: ssl.SSLContext | None, access: AccessLog | None = None) -> None:
        super().__init__(config)
        self._context, self._access = context, access
        self._acceptors: list[Acceptor] = []
        self.server_state: HttpServerState = HttpServerState(access)
        self._checking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        for listener in sockets or ():
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)  # inherited by connections
            self._acceptors.append(Acceptor(listener, self._make_protocol, self._context, self._access))
        self.servers += self._acceptors  # type: ignore[arg-type]

    def _make_protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        return cast(
            asyncio.Protocol, make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        )

    def use_certificates(self, context: ssl.SSLContext | None) -> None:
        self._context = context
        for acceptor in self._acceptors:
            acceptor.context = context

    async def on_tick(self, counter: int) -> bool:
        connections: list[Any] = list(self.server_state.connections)
        if counter % TICKS_PER_SWEEP == 0:
            now_s = asyncio.get_running_loop().time()
            for one in connections:
                one.check(now_s)
        if counter % TICKS_PER_PROBE == 0 and (self._checking is None or self._checking.done()):
            doubtful = [one for one in connections if one.is_half_closed]
            if doubtful:
                self._checking = asyncio.ensure_future(_drop_departed(doubtful))
        return await super().on_tick(counter)


async def _drop_departed(doubtful: list[Connection]) -> None:
    """Drop clients that have left. One that only closed its side differs only in its own kernel's TCP table."""
    open_sockets = await asyncio.to_thread(read_tcp_table)
    for one in doubtful:
        is_held = open_sockets.get(endpoints_of(one))
        if not one.is_half_closed or one.transport.is_closing():
            continue
        if is_held is None:
            one.probe()
        elif not is_held:
            one.drop()


def endpoints_of(connection: Connection) -> Endpoints | None:
    """Return the connection's endpoints, the client's first."""
    client, server = connection.client, connection.server
    if client is None or server is None or server[1] is None:
        return None
    return _normalize(client[0]), client[1], _normalize(server[0]), server[1]


def read_tcp_table(
    paths: Iterable[str] = ("/proc/self/net/tcp", "/proc/self/net/tcp6"),
) -> dict[Endpoints | None, bool]:
    """Map the endpoints of this machine's TCP connections to whether a process still holds them."""
    found: dict[Endpoints | None, bool] = {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(path).read_text().splitlines()[1:]:
                fields = line.split()
                found[_parse(fields[1]) + _parse(fields[2])] = fields[9] != "0"
    return found


def _parse(field: str) -> tuple[str, int]:
    """Parse an address of /proc/net/tcp: words in native byte order, then the port."""
    address, _, port = field.partition(":")
    words = [int(address[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(address), 8)]
    return _normalize(str(ipaddress.ip_address(b"".join(words)))), int(port, 16)


def _normalize(address: str) -> str:
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def make_http_server(app: Any, context: ssl.SSLContext | None, access: AccessLog | None = None) -> HttpServer:
    """Make the server of `app`. `access` counts what never reaches the app."""
    return HttpServer(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="on",
            proxy_headers=False,  # a client could forge them
            timeout_graceful_shutdown=2,
            timeout_keep_alive=KEEP_ALIVE_S,
            server_header=False,
        ),
        context,
        access,
    )
