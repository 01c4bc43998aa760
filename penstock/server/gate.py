"""Who may call what. Every route is closed unless it is named as open; decided by the route that matches, never by the
path as written."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.server.context import IDENTITY, Client
from penstock.server.errors import ApiError
from penstock.server.hosts import is_local
from penstock.server.keys import ADMIN, OPEN, KeyRing

OTHERS_LOAD = frozenset({"/metrics"})  # what all tenants together do: not for one of them
SEES_ALL = "sees_all"  # in a request's scope
ROUTE = "route_path"  # in a request's scope: the path of its route as declared, or None


class Gate:
    def __init__(self, app: ASGIApp, ring: KeyRing, routes: Sequence[BaseRoute]) -> None:
        self._app, self._ring, self._routes = app, ring, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or IDENTITY in scope:  # a batch asks as the tenant whose it is
            return await self._app(scope, receive, send)
        route = scope[ROUTE] = find_route(self._routes, scope)
        if route not in OPEN:
            local = is_local(scope)
            client = self._ring.identify(_secret(scope), is_local=local)
            denied = self._denied(client, route)
            if denied is not None:
                return await denied.response(scope["path"])(scope, receive, send)
            scope[IDENTITY] = client
            scope[SEES_ALL] = client is not None and client.is_admin or local and not self._ring.closed
        await self._app(scope, receive, send)

    def _denied(self, client: Client | None, route: str | None) -> ApiError | None:
        if client is None:
            return ApiError(
                401,
                "a valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if route in ADMIN and not client.is_admin or route in OTHERS_LOAD and self._ring.closed and not client.is_admin:
            return admin_only()
        return None


def find_route(routes: Sequence[BaseRoute], scope: Scope) -> str | None:
    """The path of the route that a request matches, as it is declared."""
    for route in routes:
        if route.matches(scope)[0] is not Match.NONE:
            path: str | None = getattr(route, "path", None)
            return path
    return None


def admin_only() -> ApiError:
    return ApiError(
        403,
        "this is for the admin: send the admin key, which the server takes from PENSTOCK_ADMIN_KEY or "
        "--admin-key-file; a server without any key answers this on its own machine only, by the name "
        "localhost",
        code="admin_only",
    )


def sees_all(request: Request) -> bool:
    """True for a client that may see what concerns the whole server: paths, processes, everyone's load."""
    return bool(request.scope.get(SEES_ALL))


def _secret(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return bytes(value[7:]).strip(b" \t")
        if name == b"x-api-key":
            return bytes(value).strip(b" \t")
    return None
