"""The router's app: the servers' routes, passed on, and its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.server.app import DELETES, READS, WRITES
from penstock.server.config import MIB
from penstock.server.connections.body_memory import BodyMemory
from penstock.server.connections.hosts import HostCheck, Hosts, OriginCheck, read_origins
from penstock.server.connections.request_parser import CheckMiddleware, Limits
from penstock.server.files.routes import MAX_FORM_BYTES
from penstock.server.http.access import AccessLogMiddleware
from penstock.server.http.context import Handler, release_body
from penstock.server.http.errors import to_api_error
from penstock.server.http.keys import AuthMiddleware
from penstock.server.router import routes
from penstock.server.router.failures import refuse
from penstock.server.router.state import RouterServer

log = logging.getLogger("penstock.router")
OWN: dict[tuple[str, str], Handler] = {
    ("GET", "/health"): routes.ready,
    ("GET", "/health/live"): routes.live,
    ("GET", "/health/ready"): routes.ready,
    ("GET", "/v1/health"): routes.ready,
    ("GET", "/health_generate"): routes.ready,
    ("GET", "/ping"): routes.ready,
    ("POST", "/ping"): routes.ready,
    ("GET", "/version"): routes.version,
    ("GET", "/metrics"): routes.metrics,
    ("GET", "/info"): routes.info,
    ("GET", "/v1/models"): routes.merge_lists,
    ("GET", "/models"): routes.merge_lists,
    ("GET", "/v1/files"): routes.merge_lists,
    ("GET", "/v1/batches"): routes.merge_lists,
    ("POST", "/v1/files"): routes.upload,
    ("POST", "/v1/load_lora_adapter"): routes.tell_all,
    ("POST", "/v1/unload_lora_adapter"): routes.tell_all,
    ("POST", "/lora-adapters"): routes.tell_all,
    ("POST", "/admin/reset_prefix_cache"): routes.tell_all,
    ("POST", "/flush_cache"): routes.tell_all,
    ("POST", "/admin/models/load"): routes.tell_all,
    ("POST", "/admin/models/unload"): routes.tell_all,
    ("POST", "/v1/sessions/save"): routes.ask_holder,
    ("POST", "/v1/sessions/restore"): routes.ask_holder,
    ("POST", "/v1/sessions/erase"): routes.ask_holder,
    ("GET", "/admin/upstreams"): routes.list_upstreams,
    ("POST", "/admin/upstreams"): routes.set_drained,
}
LEFT_OUT = {  # of one server
    *("/", "/admin/live", "/admin/running", "/admin/models", "/docs", "/api/pull", "/api/delete"),
    *("/slots", "/slots/{id}", "/responses"),
}
KEPT = ("/v1/responses/{id", "/v1/files/{id", "/v1/batches/{id", "/admin/requests/{id")  # by one server; {id:path} too


def make_app(router: RouterServer) -> Starlette:
    app = Starlette(routes=_list_routes())
    app.state.router = router
    app.state.bodies = BodyMemory(router.config.max_body_mb * MIB)
    config = router.config
    app.add_middleware(_RouteErrors)
    app.add_middleware(AuthMiddleware, ring=router.ring, routes=app.routes)
    max_upload_bytes = config.max_files_mb * MIB + MAX_FORM_BYTES
    app.add_middleware(Limits, max_body_bytes=config.max_body_mb * MIB, max_upload_bytes=max_upload_bytes)
    origins = read_origins(config.allowed_origins)
    app.add_middleware(CheckMiddleware, check=OriginCheck(origins))
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], allow_private_network=True
        )
    app.add_middleware(CheckMiddleware, check=HostCheck(Hosts(config.host, config.allowed_hosts)))
    app.add_middleware(AccessLogMiddleware, access=router.access, routes=app.routes)
    return app


def _list_routes() -> list[Route]:
    tables: Sequence[tuple[str, Sequence[Any]]] = (("GET", READS), ("POST", WRITES), ("DELETE", DELETES))
    methods: dict[str, list[str]] = {}
    for method, table in tables:
        for path, *_ in table:
            if path not in LEFT_OUT:
                methods.setdefault(path, []).append(method)
    for method, path in OWN:
        if method not in methods.setdefault(path, []):
            methods[path].append(method)
    found = []
    for path, own in methods.items():
        for method in own:
            handler = OWN.get((method, path)) or (routes.ask_owner if path.startswith(KEPT) else routes.ask_any)
            found.append(Route(path, handler, methods=[method]))
    return found


class _RouteErrors:
    """Innermost middleware: turns exceptions of routes into responses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def track(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, track)
        except Exception as error:
            known = to_api_error(error)
            if known.status >= 500 and not known.code:
                log.exception("%s failed", scope.get("path"))
            if has_begun:
                raise
            await refuse(known, scope["path"])(scope, receive, send)
        finally:
            await release_body(scope)
