"""Log and count requests, one line each, and follow their timelines from the first byte to the last."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import quote

from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.http.context import IDENTITY, OPEN_BODY, SEND, USAGE, Client, new_id
from penstock.server.http.keys import ROUTE, find_route
from penstock.server.http.log import ACCESS, FIELDS
from penstock.server.observe.trace import CURRENT, Trace
from penstock.server.page.accept import FILES_ROUTE

if TYPE_CHECKING:
    from penstock.server.engines.direct import OpenBody
    from penstock.server.generation import Usage

log = logging.getLogger(ACCESS)
METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})
QUIET = frozenset(
    {"/health", "/health/live", "/health/ready", "/ping", "/version", "/metrics", FILES_ROUTE}
)  # polled, or in numbers
OTHER = "other"  # unknown routes and methods
MAX_PATH_CHARS = 200
REFUSED = "refused_on_the_wire"  # scope key: already counted by the connection, its response is not sent
TRACE = "trace"  # scope key: the request's timeline
REQUEST_ID = re.compile(r"[A-Za-z0-9._:@+=/-]{1,128}")  # of a client


class RequestCounter(Protocol):
    """Counts requests and refused connections."""

    def count_http(self, route: str, method: str, status: int) -> None: ...

    def count_refused_connection(self, reason: str) -> None: ...


class AccessLog:
    """Write a log line and count a metric for each request."""

    def __init__(
        self, metrics: RequestCounter, is_logged: bool = True, end: Callable[[Trace], None] = lambda trace: None
    ) -> None:
        """`end` is told of each request that has ended."""
        self._metrics, self._is_logged, self._end = metrics, is_logged, end

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
        known = {"client": client, "method": method, "path": path, **({} if scope is None else scope)}
        self._record(known, route, status, seconds)

    def answer(self, scope: Scope, route: str | None, status: int, seconds: float, is_whole: bool) -> None:
        """Record a response; `is_whole` is False if it was cut short."""
        self._record(scope, route or OTHER, status, seconds, is_whole)

    def end_trace(self, trace: Trace, route: str | None, status: int) -> None:
        """End a request's timeline."""
        trace.route = route or OTHER
        if not trace.outlives_connection:
            trace.finish(status)
            self._end(trace)

    def _record(self, scope: Scope, route: str, status: int, seconds: float, is_whole: bool = True) -> None:
        method, client = scope["method"], scope.get("client")
        self._metrics.count_http(route, method if method in METHODS else OTHER, status)
        if not self._is_logged or route in QUIET and status < 400:
            return
        ms = round(1000 * seconds)
        peer = "-" if client is None else f"{f'[{client[0]}]' if ':' in client[0] else client[0]}:{client[1]}"
        plain = quote(scope["path"][:MAX_PATH_CHARS], safe="/:@{}[]()+,;=!*~$&'")
        fields = {
            "client": peer,
            "method": quote(method),
            "path": plain,
            "route": route,
            "status": status,
            "ms": ms,
            **_describe(scope, scope.get(USAGE)),
            "cut_off": not is_whole,
        }
        text = f'{peer} "{quote(method)} {plain}" {status}, {ms} ms{_summarize(fields)}'
        log.info("%s", text + ("" if is_whole else ", cut off"), extra={FIELDS: fields})


def _describe(scope: Scope, usage: Usage | None) -> dict[str, Any]:
    """List who asked, and the figures of a generation."""
    trace: Trace | None = scope.get(TRACE)
    fields: dict[str, Any] = {}
    if trace is not None:
        client = cast("Client | None", scope.get(IDENTITY))
        fields["request_id"] = trace.id
        fields["tenant"] = trace.tenant or (client.tenant if client is not None else "")
        if trace.model:
            fields |= {"id": trace.answer_id or trace.id, "model": trace.model}
        if trace.loras:
            fields["lora"] = "+".join(trace.loras)
    if usage is not None:
        tokens = (usage.num_prompt, usage.num_output, usage.num_cached)
        fields |= dict(zip(("prompt_tokens", "completion_tokens", "cached_tokens"), tokens))
        fields |= usage.energy
    if usage is not None and trace is not None:
        begun_s = trace.queued_s or trace.begun_s
        for name, at_s in (("queue_ms", trace.run_s), ("ttft_ms", trace.first_s)):
            fields[name] = None if at_s is None else round(1000 * (at_s - begun_s), 1)
        fields["finish_reason"] = ",".join(dict.fromkeys(trace.finish_reasons)) or None
    return fields


def _summarize(fields: dict[str, Any]) -> str:
    parts = [""]
    if "prompt_tokens" in fields:
        cached = f" ({fields['cached_tokens']} cached)" if fields["cached_tokens"] else ""
        parts.append(f"{fields['prompt_tokens']} tokens in{cached}, {fields['completion_tokens']} out")
    if fields.get("ttft_ms") is not None:
        parts.append(f"queue {fields['queue_ms'] or 0:.0f} ms, first token {fields['ttft_ms']:.0f} ms")
    parts += [str(fields[name]) for name in ("finish_reason", "lora", "tenant", "id") if fields.get(name)]
    return ", ".join(parts)


class AccessLogMiddleware:
    """Outermost middleware: records every response."""

    def __init__(self, app: ASGIApp, access: AccessLog, routes: Sequence[BaseRoute]) -> None:
        self._app, self._access, self._routes = app, access, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        is_internal = IDENTITY in scope  # a batch's request, which is not logged
        status, is_whole, begun_s = 500, False, time.monotonic()
        trace = scope[TRACE] = _begin_trace(scope, begun_s)
        token, body = CURRENT.set(trace), cast("OpenBody | None", scope.get(OPEN_BODY))

        async def pass_on(message: Message) -> None:
            if body is None or not body.is_held_up:
                return await send(message)
            with trace.wait_for_client():
                await send(message)

        async def record(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", trace.id.encode())]
            await pass_on(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        if not is_internal:
            scope[SEND] = pass_on
        try:
            await self._app(scope, receive, record)
        finally:
            CURRENT.reset(token)
            route = scope[ROUTE] if ROUTE in scope else None if is_internal else find_route(self._routes, scope)
            self._access.end_trace(trace, route, status)
            if REFUSED not in scope and not is_internal:
                self._access.answer(scope, route, status, time.monotonic() - begun_s, is_whole)


def _begin_trace(scope: Scope, begun_s: float) -> Trace:
    """Begin a timeline, by the client's x-request-id if it has a fitting one."""
    id, parent = "", ""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            found = REQUEST_ID.fullmatch(value.decode("latin-1"))
            id = found[0] if found else ""
        elif name == b"traceparent":
            parent = value.decode("latin-1")[:128]
    trace = Trace(id or new_id("req_"), begun_s=begun_s)
    trace.parent = parent
    return trace
