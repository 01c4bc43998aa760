"""Set up the log, as text or JSON lines, and log and count requests.

Access lines are written by a thread and dropped if it falls behind.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.http.context import IDENTITY, SEND, USAGE
from penstock.server.http.keys import ROUTE, find_route

if TYPE_CHECKING:
    from penstock.server.generation import Usage
    from penstock.server.metrics import Metrics

ACCESS = "penstock.access"
FIELDS = "fields"  # attribute of a record: further JSON fields
MAX_WAITING = 10_000  # unwritten lines
PATIENCE_S = 1.0  # for the descriptor to become writable
CLOSE_S = 2.0
log = logging.getLogger(ACCESS)
METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})
QUIET = frozenset({"/health", "/health/live", "/health/ready", "/version", "/metrics"})  # polled
OTHER = "other"  # unknown routes and methods
MAX_PATH_CHARS = 200
REFUSED = "refused_on_the_wire"  # scope key: already counted by the connection, its response is not sent


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class QueuedHandler(logging.Handler):
    """Write to a descriptor from a thread; if it blocks, lines are dropped and counted so that requests never wait."""

    def __init__(self, descriptor: int, max_waiting: int = MAX_WAITING) -> None:
        super().__init__()
        self.num_dropped = 0
        self._descriptor = descriptor
        self._waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._write_all, name="access-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
            self._thread.join(CLOSE_S)
        super().close()

    def _write_all(self) -> None:
        while (record := self._waiting.get()) is not None:
            if not self._write(record):
                self.num_dropped += 1
            elif self.num_dropped:
                num_dropped, self.num_dropped = self.num_dropped, 0
                self._write(
                    logging.LogRecord(
                        ACCESS,
                        logging.WARNING,
                        "",
                        0,
                        "%d access log lines were dropped: the log was not read",
                        (num_dropped,),
                        None,
                    )
                )

    def _write(self, record: logging.LogRecord) -> bool:
        try:
            if not select.select([], [self._descriptor], [], PATIENCE_S)[1]:
                return False
            os.write(self._descriptor, (self.format(record) + "\n").encode(errors="backslashreplace"))
        except (OSError, ValueError):  # a full disk or a closed descriptor
            return False
        return True


def set_up_log(form: str) -> None:
    formatter = JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("penstock").setLevel(logging.INFO)
    access = logging.getLogger(ACCESS)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no standard error
        queued = QueuedHandler(sys.stderr.fileno())
        queued.setFormatter(formatter)
        access.handlers, access.propagate = [queued], False


class AccessLog:
    """Write a log line and count a metric for each request."""

    def __init__(self, metrics: Metrics, is_logged: bool = True) -> None:
        self._metrics, self._is_logged = metrics, is_logged

    def refuse_connection(self, reason: str) -> None:
        self._metrics.count_refused_connection(reason)

    def refuse(
        self, client: tuple[str, int] | None, path: str, status: int, seconds: float, scope: Scope | None
    ) -> None:
        """Record a refusal by the connection; `scope` is set if the app already has the request."""
        method, route = "-", OTHER
        if scope is not None:
            scope[REFUSED] = True
            method, route = scope["method"], scope.get(ROUTE) or OTHER
        self._record(client, method, path, route, status, seconds)

    def answer(self, scope: Scope, route: str | None, status: int, seconds: float, is_whole: bool) -> None:
        """Record a response; `is_whole` is False if it was cut short."""
        self._record(
            scope.get("client"),
            scope["method"],
            scope["path"],
            route or OTHER,
            status,
            seconds,
            is_whole,
            scope.get(USAGE),
        )

    def _record(
        self,
        client: Sequence[Any] | None,
        method: str,
        path: str,
        route: str,
        status: int,
        seconds: float,
        is_whole: bool = True,
        usage: Usage | None = None,
    ) -> None:
        self._metrics.count_http(route, method if method in METHODS else OTHER, status)
        if not self._is_logged or route in QUIET and status < 400:
            return
        ms = round(1000 * seconds)
        peer = "-" if client is None else f"{f'[{client[0]}]' if ':' in client[0] else client[0]}:{client[1]}"
        plain = quote(path[:MAX_PATH_CHARS], safe="/:@{}[]()+,;=!*~$&'")
        tokens = {} if usage is None else {"prompt_tokens": usage.num_prompt, "completion_tokens": usage.num_output}
        suffix = f", {usage.num_prompt} tokens in, {usage.num_output} out" if usage is not None else ""
        log.info(
            "%s",
            f'{peer} "{quote(method)} {plain}" {status}, {ms} ms{suffix}{"" if is_whole else ", cut off"}',
            extra={
                FIELDS: {
                    "client": peer,
                    "method": quote(method),
                    "path": plain,
                    "status": status,
                    "ms": ms,
                    **tokens,
                    "cut_off": not is_whole,
                }
            },
        )


class AccessLogMiddleware:
    """Outermost middleware: records every response."""

    def __init__(self, app: ASGIApp, access: AccessLog, routes: Sequence[BaseRoute]) -> None:
        self._app, self._access, self._routes = app, access, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or IDENTITY in scope:  # an internal batch request
            return await self._app(scope, receive, send)
        status, is_whole, begun_s = 500, False, time.monotonic()
        scope[SEND] = send

        async def record(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, record)
        finally:
            if REFUSED not in scope:
                route = scope[ROUTE] if ROUTE in scope else find_route(self._routes, scope)
                self._access.answer(scope, route, status, time.monotonic() - begun_s, is_whole)
