"""Middleware that refuses requests by what their heads say."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.server.errors import ApiError


class Refuser:
    """Answers with the error that `check` finds in a request, or lets the request pass."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], ApiError | None]) -> None:
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._check(scope) if scope["type"] == "http" else None
        if refused is not None:
            return await refused.response(scope["path"])(scope, receive, send)
        await self._app(scope, receive, send)
