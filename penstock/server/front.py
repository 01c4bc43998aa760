"""The HTTP server: uvicorn with our connections, whose clients are looked after once a second."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from penstock.server.acceptor import AcceptingServer
from penstock.server.access import Access
from penstock.server.descriptors import max_connections
from penstock.server.seats import Seats
from penstock.server.wire import KEEP_ALIVE_S, SOCKET_BUFFER_BYTES, Connection

TICKS_PER_SWEEP = 10  # of uvicorn's, which are 0.1 s
TICKS_PER_LOOK = 5
Ends = tuple[str, int, str, int]  # an address and its port, and those of the other end


class FrontState(ServerState):
    def __init__(self, access: Access | None) -> None:
        super().__init__()
        self.access = access
        most = max_connections()
        self.seats = Seats(most - most // 8)  # the acceptor, which can only refuse, shall not come before


class Front(AcceptingServer):
    def __init__(self, config: uvicorn.Config, context: ssl.SSLContext | None, access: Access | None = None) -> None:
        super().__init__(config, context, access)
        self.server_state: FrontState = FrontState(access)
        self._looking: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or ():
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)  # its connections' too
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        connections: list[Any] = list(self.server_state.connections)
        if counter % TICKS_PER_SWEEP == 0:
            now_s = asyncio.get_running_loop().time()
            for one in connections:
                one.check(now_s)
        if counter % TICKS_PER_LOOK == 0 and (self._looking is None or self._looking.done()):
            in_doubt = [one for one in connections if one.is_in_doubt]
            if in_doubt:
                self._looking = asyncio.ensure_future(_look(in_doubt))
        return await super().on_tick(counter)


async def _look(in_doubt: list[Connection]) -> None:
    """Drop clients that have gone. One that only ended its side looks the same from here, but not from its own."""
    held = await asyncio.to_thread(held_ends)
    for one in in_doubt:
        is_held = held.get(ends_of(one))
        if not one.is_in_doubt or one.transport.is_closing():
            continue
        if is_held is None:
            one.check_reset()
            one.probe()
        elif not is_held:
            one.drop()


def ends_of(connection: Connection) -> Ends | None:
    """The client's end and ours."""
    client, server = connection.client, connection.server
    if client is None or server is None or server[1] is None:
        return None
    return _plain(client[0]), client[1], _plain(server[0]), server[1]


def held_ends(files: Iterable[str] = ("/proc/self/net/tcp", "/proc/self/net/tcp6")) -> dict[Ends | None, bool]:
    """The ends of connections on this machine, and whether a process still holds each of them."""
    found: dict[Ends | None, bool] = {}
    for file in files:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(file).read_text().splitlines()[1:]:
                fields = line.split()
                found[_parse(fields[1]) + _parse(fields[2])] = fields[9] != "0"
    return found


def _parse(field: str) -> tuple[str, int]:
    """From an address as the kernel prints it: words in the machine's order, a port."""
    address, _, port = field.partition(":")
    words = [int(address[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(address), 8)]
    return _plain(str(ipaddress.ip_address(b"".join(words)))), int(port, 16)


def _plain(address: str) -> str:
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def make_front(app: Any, context: ssl.SSLContext | None, access: Access | None = None) -> Front:
    """`access` is told of what never reaches the application."""
    # The peer is who connects: what a forwarding header says is believed by nobody.
    return Front(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="on",
            proxy_headers=False,
            timeout_graceful_shutdown=2,
            timeout_keep_alive=KEEP_ALIVE_S,
            server_header=False,
        ),
        context,
        access,
    )
