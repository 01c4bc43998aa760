"""The HTTP server with a small application, in a thread: for what clients do to connections."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from types import TracebackType
from typing import Any

from penstock.server.config import MIB
from penstock.server.connections.http_server import HttpServer, make_http_server
from penstock.server.connections.request_parser import Limits

CHUNK = b"x" * 32768


class Application:
    """Answers `/` with the body's length and the headers, `/endless` for ever, `/slow` when `go` is set."""

    def __init__(self) -> None:
        self.num_running = 0
        self.num_chunks = 0
        self.go = threading.Event()
        self._leaving: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._live(receive, send)
        self.num_running += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self.num_running -= 1

    async def _live(self, receive: Any, send: Any) -> None:
        for part in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{part}.complete"})

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        num_bytes, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            num_bytes, more = num_bytes + len(message["body"]), message["more_body"]
        if scope["path"] == "/slow":
            gone = asyncio.ensure_future(receive())
            while not self.go.is_set() and not gone.done():
                await asyncio.sleep(0.01)
            if gone.done():
                return
            gone.cancel()
        said = {
            "bytes": num_bytes,
            "path": scope["path"],
            "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]],
            "authority": scope.get("authority", b"").decode(),
        }
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/endless":
            while (await self._look(receive)) is None:
                self.num_chunks += 1
                await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        for part in json.dumps(said).encode().split(b" "):
            await send({"type": "http.response.body", "body": part + b" ", "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    async def _look(self, receive: Any) -> Any:
        """As starlette does it: the client's going away is a message."""
        if self._leaving is None or self._leaving.done():
            self._leaving = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        return self._leaving.result() if self._leaving.done() else None


class FrontedServer:
    """`loop` makes the event loop: asyncio's own, or uvloop's."""

    def __init__(self, loop: Any = asyncio.new_event_loop) -> None:
        self.app = Application()
        self._make_loop = loop
        self._ready = threading.Event()

    def __enter__(self) -> FrontedServer:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def _run(self) -> None:
        loop = self._make_loop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._serve())
        finally:
            loop.close()

    async def _serve(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = listener.getsockname()[1]
        self.front: HttpServer = make_http_server(Limits(self.app, MIB), None)
        serving = asyncio.ensure_future(self.front.serve([listener]))
        while not self.front.started:
            await asyncio.sleep(0.01)
        self._ready.set()
        await serving

    def connect(self, receive_bytes: int | None = None) -> socket.socket:
        line = socket.socket()
        if receive_bytes is not None:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        line.settimeout(20)
        line.connect(("127.0.0.1", self.port))
        return line

    def ask(self, request: bytes, *, end: bool = False) -> bytes:
        """Everything that comes back for these bytes, until the server closes."""
        with self.connect() as line:
            line.sendall(request)
            if end:
                line.shutdown(socket.SHUT_WR)
            return everything(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.app.go.set()
        self.front.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()


def everything(line: socket.socket) -> bytes:
    found = b""
    while True:
        try:
            part = line.recv(1 << 16)
        except ConnectionError:
            return found
        if not part:
            return found
        found += part
