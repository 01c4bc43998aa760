"""Middleware for a server behind a proxy that serves it under a path of its own."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Strip `root_path` from paths that begin with it: a proxy may have stripped it, or not."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app, self._root = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["path"] + "/").startswith(self._root + "/"):
            scope["path"] = scope["path"][len(self._root) :] or "/"
            scope["raw_path"] = scope["raw_path"].removeprefix(self._root.encode()) or b"/"
        await self._app(scope, receive, send)
