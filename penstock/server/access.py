"""Every request that was answered or refused: a line in the log and a count by route, method and status."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.context import IDENTITY, USAGE
from penstock.server.gate import ROUTE, find_route
from penstock.server.log import ACCESS, FIELDS

if TYPE_CHECKING:
    from penstock.server.generation import Usage
    from penstock.server.metrics import Metrics

log = logging.getLogger(ACCESS)

METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})
QUIET = frozenset({"/health", "/health/live", "/health/ready", "/version", "/metrics"})  # asked every few seconds
OTHER = "other"  # of routes and methods that the server does not have
MAX_PATH_CHARS = 200
REFUSED = "refused_on_the_wire"  # in a request's scope: counted there, and its answer is not sent


class Access:
    def __init__(self, metrics: Metrics, is_logged: bool = True) -> None:
        self._metrics, self._is_logged = metrics, is_logged

    def refuse_connection(self, reason: str) -> None:
        self._metrics.connection_refused(reason)

    def refuse(
        self, client: tuple[str, int] | None, path: str, status: int, seconds: float, scope: Scope | None
    ) -> None:
        """A refusal before the application, or in its place where it has the request's `scope` already."""
        method, route = "-", OTHER
        if scope is not None:
            scope[REFUSED] = True
            method, route = scope["method"], scope.get(ROUTE) or OTHER
        self._note(client, method, path, route, status, seconds)

    def answer(self, scope: Scope, route: str | None, status: int, seconds: float, is_whole: bool) -> None:
        """`is_whole` says that the answer was sent to its end."""
        self._note(
            scope.get("client"),
            scope["method"],
            scope["path"],
            route or OTHER,
            status,
            seconds,
            is_whole,
            scope.get(USAGE),
        )

    def _note(
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
        self._metrics.http(route, method if method in METHODS else OTHER, status)
        if not self._is_logged or route in QUIET and status < 400:
            return
        ms = round(1000 * seconds)
        peer = "-" if client is None else f"{f'[{client[0]}]' if ':' in client[0] else client[0]}:{client[1]}"
        plain = quote(path[:MAX_PATH_CHARS], safe="/:@{}[]()+,;=!*~$&'")
        tokens = {} if usage is None else {"prompt_tokens": usage.num_prompt, "completion_tokens": usage.num_output}
        told = f", {usage.num_prompt} tokens in, {usage.num_output} out" if usage is not None else ""
        log.info(
            "%s",
            f'{peer} "{quote(method)} {plain}" {status}, {ms} ms{told}{"" if is_whole else ", cut off"}',
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


class Accounted:
    """Middleware around all others."""

    def __init__(self, app: ASGIApp, access: Access, routes: Sequence[BaseRoute]) -> None:
        self._app, self._access, self._routes = app, access, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or IDENTITY in scope:  # a batch asks within the server
            return await self._app(scope, receive, send)
        status, is_whole, begun_s = 500, False, time.monotonic()

        async def sent(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, sent)
        finally:
            if REFUSED not in scope:
                route = scope[ROUTE] if ROUTE in scope else find_route(self._routes, scope)
                self._access.answer(scope, route, status, time.monotonic() - begun_s, is_whole)
