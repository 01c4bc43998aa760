"""The router's routes: what goes to any server, to the one that has it, to all of them, or is its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.errors import Busy
from penstock.host.version import VERSION
from penstock.server.http.access import TRACE
from penstock.server.http.context import client_of, json_response, receive_body, release_body
from penstock.server.http.errors import ApiError
from penstock.server.http.keys import sees_all
from penstock.server.http.relay import ADMIN_HEADER, KEY_HEADER, TENANT_HEADER
from penstock.server.router.failures import make_no_server_error, make_owner_error
from penstock.server.router.forward import Call, Forward, drop_hops
from penstock.server.router.http_client import Headers, UpstreamFailed, UpstreamResponse
from penstock.server.router.prompts import PromptFacts, read_prompt
from penstock.server.router.state import MAX_KEPT_BYTES, RouterServer
from penstock.server.router.upstream import Upstream

MAX_ANSWER_BYTES = 16 << 20  # of one server, where several are asked
MAX_LOOP_BYTES = 1 << 20  # of a body that is read on the event loop
MAX_ID = 256  # of what a server keeps
EMPTYING = ("/admin/reset_prefix_cache", "/flush_cache")
LIGHT = frozenset(  # routes that take no row of an engine
    {
        *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/apply-template", "/api/show"),
        *("/v1/messages/count_tokens", "/v1/responses/input_tokens"),
        *("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens", "/v1/batches"),
    }
)
KEEPERS = ("/v1/responses", "/v1/batches")
SECRETS = (b"authorization", b"x-api-key")
NOT_PASSED = frozenset({b"host", b"content-length", b"accept-encoding", b"expect", b"x-forwarded-for", b"forwarded"})


def router_of(request: Request) -> RouterServer:
    return cast(RouterServer, request.app.state.router)


class _Tracked:
    """A response that counts as running until it ends."""

    def __init__(self, router: RouterServer, response: Any, num_bytes: int = 0) -> None:
        self._router, self._response, self._num_bytes = router, response, num_bytes
        router.num_running += 1
        router.num_kept_bytes += num_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            self._router.num_running -= 1
            self._router.num_kept_bytes -= self._num_bytes


async def ask_any(request: Request) -> Response:
    """Send a request to the server that suits its prompt."""
    router = router_of(request)
    body = await _read(request, router)
    facts = await _read_facts(request, body)
    owner = None
    if facts.refers_to is not None:
        probe = "/v1/files/" if facts.refers_to.startswith("file") else "/v1/responses/"
        owner = await _find_owner(request, facts.refers_to, probe + quote(facts.refers_to, safe=""))
    queue = router.queue if request.method == "POST" and request.scope["path"] not in LIGHT else None
    if queue is None:
        facts = replace(facts, num_rows=0)
    call = _make_call(request, body, facts, owner)
    return cast(Response, _Tracked(router, Forward(router.pool, call, queue), len(body)))


async def ask_owner(request: Request) -> Response:
    """Send a request to the server that has what it names."""
    router = router_of(request)
    body, id = await _read(request, router), str(request.path_params["id"])
    prefix = "/".join(request.scope["path"].split("/", 3)[:3])  # of the routes that it has: /v1/files, …
    owner = await _find_owner(request, id, f"{prefix}/{quote(id, safe='')}")
    if owner is None:
        owner = router.pool.choose(PromptFacts())  # it says that there is no such thing
    return cast(
        Response, _Tracked(router, Forward(router.pool, _make_call(request, body, PromptFacts(), owner)), len(body))
    )


async def ask_holder(request: Request) -> Response:
    """Ask the server that holds a session, then the others; to erase it, all of them."""
    router = router_of(request)
    body = await _read(request, router)
    facts = await _read_facts(request, body)
    holder = None if facts.session is None else router.pool.find_owner(facts.session)
    erases = request.scope["path"].endswith("erase")
    answers = await _ask_in_turn(request, body, holder, asks_all=erases)
    told = [(one, response, text) for one, response, text in answers if response is not None]
    known = [one for one in told if one[1].status != 404]
    if not known and (not told or holder is not None and not holder.is_ready):
        raise make_no_server_error() if holder is None else make_owner_error()
    upstream, response, text = (known or told)[0]
    if response.status == 200 and facts.session is not None and not erases:
        router.pool.sticky.put(facts.session, upstream)
    return Response(text, response.status, media_type="application/json")


async def _ask_in_turn(request: Request, body: bytes, first: Upstream | None, *, asks_all: bool) -> list[Answer]:
    """Ask the servers that are up until one knows what is named, `first` first; their answers."""
    answers = []
    for one in sorted(router_of(request).pool, key=lambda one: one is not first):
        if one.is_ready:
            answers.append(await _ask_one(request, one, body))
            response = answers[-1][1]
            if response is not None and response.status != 404 and not asks_all:
                break
    return answers


MODEL_PATHS = ("/v1/models", "/models")


async def tell_all(request: Request) -> Response:
    """Tell every server; the first that refuses gives the answer."""
    router = router_of(request)
    body = await _read(request, router)
    answers = await _ask_all(request, body)
    for one in router.pool:
        one.forget_models()
        if request.url.path in EMPTYING:
            one.prefixes.clear()
    failed = [answer for answer in answers if answer[1] is None or answer[1].status >= 400]
    upstream, response, text = (failed or answers)[0]
    if response is None:
        raise ApiError(
            502,
            f"{len(failed)} of {len(answers)} servers were not told: repeat it when all are ready",
            code="upstream_lost",
        )
    kept = {
        name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers if name == b"content-type"
    }
    return Response(text, response.status, kept)


async def merge_lists(request: Request) -> Response:
    """Join the lists of all servers, each entry once."""
    answers = [one for one in await _ask_all(request, b"") if one[1] is not None]
    good = [(upstream, text) for upstream, response, text in answers if response is not None and response.status == 200]
    if not good:
        if not answers:
            raise make_no_server_error()
        _, response, text = answers[0]
        return Response(text, 502 if response is None else response.status, media_type="application/json")
    pool = router_of(request).pool
    entries: dict[str, Any] = {}
    merged: dict[str, Any] = {}
    for upstream, text in good:
        with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
            listed = msgspec.json.decode(text)
            for entry in listed["data"]:
                entries.setdefault(str(entry["id"]), entry)
                if request.url.path not in MODEL_PATHS:
                    pool.sticky.put(str(entry["id"]), upstream)
            merged = {**listed, "has_more": bool(merged.get("has_more") or listed.get("has_more"))}
    data = list(entries.values())
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data and "first_id" in merged else {}
    if request.url.path in MODEL_PATHS:
        merged.pop("has_more", None)
    return json_response({**merged, "data": data, **ends})


async def upload(request: Request) -> Response:
    """Pass an upload on as it comes; its server keeps the file."""
    router = router_of(request)
    upstream = router.pool.choose(PromptFacts())
    if router.is_draining or upstream is None:
        raise make_no_server_error()
    headers = _list_headers(request)

    async def parts() -> AsyncIterator[bytes]:
        async for part in request.stream():
            yield part

    try:
        response = await upstream.client.send("POST", _target(request), headers, parts())
        try:
            text = await response.read(MAX_ANSWER_BYTES)
        finally:
            response.close()
    except UpstreamFailed as error:
        upstream.die(str(error))
        raise ApiError(502, "the server of this upload was lost: send it again", code="upstream_lost") from None
    if response.status == 200:
        with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
            router.pool.sticky.put(str(msgspec.json.decode(text)["id"]), upstream)
    return Response(text, response.status, media_type="application/json")


async def live(request: Request) -> Response:
    """Report that the process answers."""
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """Report if any server takes requests."""
    router = router_of(request)
    num_ready = sum(one.takes_requests for one in router.pool)
    counts = {"upstreams": len(router.pool.upstreams), "upstreams_ready": num_ready}
    if router.is_ready:
        return json_response({"status": "ready", **counts})
    status = "stopping" if router.is_draining else "no server takes requests"
    return json_response({"status": status, **counts}, 503, {"Retry-After": "1"})


async def version(request: Request) -> Response:
    return json_response({"version": VERSION})


async def metrics(request: Request) -> Response:
    return Response(router_of(request).metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def info(request: Request) -> Response:
    """Describe the router; its servers only to those who may see the whole."""
    router = router_of(request)
    shown: dict[str, Any] = {"version": VERSION, "uptime_s": time.time() - router.begun_s}
    if sees_all(request):
        shown["upstreams"] = [_describe(one) for one in router.pool]
    return json_response(shown)


async def list_upstreams(request: Request) -> Response:
    return json_response({"upstreams": [_describe(one) for one in router_of(request).pool]})


class _Drain(msgspec.Struct):
    """Names a server, and says if it gets nothing new."""

    url: str
    drain: bool


async def set_drained(request: Request) -> Response:
    """Send a server nothing new, or send it requests again."""
    try:
        body = msgspec.json.decode(await _read(request, router_of(request)), type=_Drain)
    except msgspec.DecodeError as error:
        raise ApiError(400, f'{error}: send {{"url": "http://…", "drain": true}}', code="invalid_value") from None
    found = next((one for one in router_of(request).pool if one.name == body.url.rstrip("/")), None)
    if found is None:
        raise ApiError(404, "there is no such server: GET /admin/upstreams lists them", param="url", code="not_found")
    found.is_drained = body.drain
    return json_response(_describe(found))


def _describe(one: Upstream) -> dict[str, Any]:
    return {
        "url": one.name,
        "role": one.role,
        "state": "drained" if one.is_drained else one.state,
        "is_ready": one.takes_requests,
        "running": one.num_running,
        "failures": one.num_deaths,
        "max_rows": one.max_rows,
        "models": None if one.models is None else sorted(one.models),
    }


async def _read(request: Request, router: RouterServer) -> bytes:
    """Read a body that may be sent several times."""
    if router.is_draining:
        raise Busy("the router is stopping", 5, 503)
    body = bytes(await receive_body(request))
    await release_body(request.scope)
    if router.num_kept_bytes + len(body) > MAX_KEPT_BYTES:
        raise Busy(
            f"the bodies of running requests have {router.num_kept_bytes} bytes, the limit is {MAX_KEPT_BYTES}: try "
            "again later",
            5,
            503,
        )
    return body


async def _read_facts(request: Request, body: bytes) -> PromptFacts:
    if not body:
        return PromptFacts()
    tenant = _name_tenant(request)
    if len(body) <= MAX_LOOP_BYTES:
        return read_prompt(body, request.url.path, tenant)
    return await asyncio.to_thread(read_prompt, body, request.url.path, tenant)


def _name_tenant(request: Request) -> str:
    """Name the client by its key: the router's own, or one that servers know."""
    return client_of(request).tenant or repr([value for name, value in request.headers.raw if name in SECRETS])


def _make_call(request: Request, body: bytes, facts: PromptFacts, owner: Upstream | None) -> Call:
    key = router_of(request).router_key
    return Call(
        _method(request),
        request.url.path,
        _target(request),
        _list_headers(request),
        body,
        facts,
        owner,
        learns_id=request.method == "POST" and request.url.path in KEEPERS,
        router_key=None if key is None else key.encode(),
        tenant=_name_tenant(request),
    )


def _method(request: Request) -> str:
    """Return the method for a server: the connection drops the body of an answer to HEAD."""
    return "GET" if request.method == "HEAD" else request.method


def _target(request: Request) -> bytes:
    raw: bytes = request.scope.get("raw_path") or request.url.path.encode()
    query: bytes = request.scope["query_string"]
    return raw + (b"?" + query if query else b"")


def _list_headers(request: Request) -> Headers:
    """List the headers for a server: the client's, but with the router's word for who it is."""
    router, client = router_of(request), client_of(request)
    own = router.list_key_headers()
    vouches = router.ring.closed or client.is_admin and router.ring.has_admin  # it has seen a key
    replaces = bool(own) or router.ring.closed
    headers = [
        (name, value)
        for name, value in drop_hops(request.headers.raw)
        if name not in NOT_PASSED and not name.startswith(b"penstock-") and not (replaces and name in SECRETS)
    ]
    if vouches and router.router_key is not None:
        headers += [(KEY_HEADER, router.router_key.encode()), (TENANT_HEADER, client.tenant.encode())]
        headers += [(ADMIN_HEADER, b"1")] if client.is_admin else []
    peer = request.client.host if request.client is not None else "unknown"
    trace = request.scope.get(TRACE)
    headers += [] if trace is None else [(b"x-request-id", trace.id.encode())]
    return [*headers, *own, (b"x-forwarded-for", peer.encode())]


async def _find_owner(request: Request, id: str, path: str) -> Upstream | None:
    """Find the server that has something; all are asked if it is not known."""
    pool = router_of(request).pool
    owner = pool.find_owner(id)
    if owner is None and len(id) <= MAX_ID:
        answers = await _ask_all(request, b"", "GET", path.encode())
        owner = next((one for one, response, _ in answers if response is not None and response.status == 200), None)
        if owner is not None:
            pool.sticky.put(id, owner)
    return owner


Answer = tuple[Upstream, UpstreamResponse | None, bytes]  # None: the server was lost


async def _ask_all(
    request: Request, body: bytes, method: str | None = None, target: bytes | None = None
) -> list[Answer]:
    asked = (_ask_one(request, one, body, method, target) for one in router_of(request).pool)
    return list(await asyncio.gather(*asked))


async def _ask_one(
    request: Request, one: Upstream, body: bytes, method: str | None = None, target: bytes | None = None
) -> Answer:
    headers = _list_headers(request)
    try:
        response = await one.client.send(
            method or _method(request), target or _target(request), headers, [body] if body else []
        )
        try:
            return one, response, await response.read(MAX_ANSWER_BYTES)
        finally:
            response.close()
    except UpstreamFailed as error:
        one.refuse(str(error))
        return one, None, b""
