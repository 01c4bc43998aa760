"""The app: its routes and middleware."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

from penstock.errors import quote
from penstock.host.version import VERSION
from penstock.server import loading, status
from penstock.server.anthropic.body import CountTokensBody, MessagesBody
from penstock.server.anthropic.errors import AnthropicErrors
from penstock.server.anthropic.routes import count_tokens, messages
from penstock.server.batches.batches import BatchBody, batch, batches, cancel_batch, create_batch, open_batches
from penstock.server.config import MIB, ServerConfig
from penstock.server.connections.body_memory import BodyMemory
from penstock.server.connections.hosts import HostCheck, Hosts, OriginCheck, read_origins
from penstock.server.connections.request_parser import CheckMiddleware, Limits
from penstock.server.files.routes import MAX_FORM_BYTES, delete_file, file, file_content, files, upload_file
from penstock.server.http.access import AccessLogMiddleware
from penstock.server.http.context import Handler, release_body
from penstock.server.http.errors import MAX_MESSAGE_CHARS, WarningHeaders, to_api_error
from penstock.server.http.keys import AuthMiddleware, KeyRing, make_router_access
from penstock.server.http.openapi import asset, describe_body, docs, make_document
from penstock.server.http.root_path import RootPath
from penstock.server.llama import routes as llama
from penstock.server.loras import routes as loras
from penstock.server.observe import routes as observe
from penstock.server.ollama import routes as ollama
from penstock.server.openai.chat import chat_completions
from penstock.server.openai.chat_body import ChatBody
from penstock.server.openai.completions import CompletionBody, completions
from penstock.server.openai.embeddings import EmbeddingBody, RerankBody, ScoreBody, embeddings, rerank, score
from penstock.server.openai.invocations import invoke
from penstock.server.openai.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize
from penstock.server.page import routes as page
from penstock.server.responses.background import Background, ResponseStore
from penstock.server.responses.body import InputTokensBody, ResponsesBody
from penstock.server.responses.routes import (
    cancel_response,
    delete_response,
    input_items,
    input_tokens,
    response,
    responses,
)
from penstock.server.sessions import routes as sessions
from penstock.server.sessions import slots
from penstock.server.sglang import routes as sglang
from penstock.server.state import Server
from penstock.server.tgi import routes as tgi

log = logging.getLogger("penstock.server")

READS: list[tuple[str, Handler, str]] = [
    ("/health", status.health, "health"),
    ("/health/live", status.live, "health"),
    ("/health/ready", status.ready, "health"),
    ("/ping", status.ready, "health"),
    ("/version", status.version, "health"),
    ("/v1/models", status.models, "models"),
    ("/v1/models/{name:path}", status.model, "models"),
    ("/info", status.info, "about"),
    ("/metrics", status.metrics, "about"),
    ("/admin/running", status.list_running, "about"),
    ("/slots", slots.show, "llama-server"),
    ("/admin/models", loading.list_all, "about"),
    ("/admin/live", observe.watch_live, "about"),
    ("/admin/requests/{id:path}", observe.explain_request, "about"),
    ("/v1/responses/{id}", response, "OpenAI"),
    ("/v1/responses/{id}/input_items", input_items, "OpenAI"),
    ("/v1/files", files, "OpenAI"),
    ("/v1/files/{id}", file, "OpenAI"),
    ("/v1/files/{id}/content", file_content, "OpenAI"),
    ("/v1/batches", batches, "OpenAI"),
    ("/v1/batches/{id}", batch, "OpenAI"),
    ("/", page.root, "about"),
    *loras.READS,
    *llama.READS,
    *sglang.READS,
    *ollama.READS,
]
PAGES: list[tuple[str, Handler]] = [("/docs", docs), ("/docs/{name}", asset), *page.PAGES]
WRITES: list[tuple[str, Handler, type[BaseModel] | None, str]] = [
    ("/v1/chat/completions", chat_completions, ChatBody, "OpenAI"),
    ("/v1/completions", completions, CompletionBody, "OpenAI"),
    ("/v1/embeddings", embeddings, EmbeddingBody, "OpenAI"),
    ("/v1/responses", responses, ResponsesBody, "OpenAI"),
    ("/v1/responses/input_tokens", input_tokens, InputTokensBody, "OpenAI"),
    ("/v1/responses/{id}/cancel", cancel_response, None, "OpenAI"),
    ("/v1/files", upload_file, None, "OpenAI"),
    ("/v1/batches", create_batch, BatchBody, "OpenAI"),
    ("/v1/batches/{id}/cancel", cancel_batch, None, "OpenAI"),
    ("/v1/messages", messages, MessagesBody, "Anthropic"),
    ("/v1/messages/count_tokens", count_tokens, CountTokensBody, "Anthropic"),
    ("/invocations", invoke, None, "SageMaker"),
    ("/ping", status.ready, None, "health"),
    ("/tokenize", tokenize, TokenizeBody, "tokens"),
    ("/detokenize", detokenize, DetokenizeBody, "tokens"),
    ("/v1/tokenize", tokenize, TokenizeBody, "tokens"),
    ("/v1/detokenize", detokenize, DetokenizeBody, "tokens"),
    ("/score", score, ScoreBody, "embeddings"),
    ("/v1/score", score, ScoreBody, "embeddings"),
    ("/rerank", rerank, RerankBody, "embeddings"),
    ("/v1/rerank", rerank, RerankBody, "embeddings"),
    ("/v1/sessions/save", sessions.save, sessions.SessionBody, "cache"),
    ("/v1/sessions/restore", sessions.restore, sessions.RestoreBody, "cache"),
    ("/v1/sessions/erase", sessions.erase, sessions.SessionBody, "cache"),
    ("/slots/{id}", slots.act, slots.SlotBody, "llama-server"),
    ("/admin/models/load", loading.load, loading.ModelBody, "about"),
    ("/admin/models/unload", loading.unload, loading.ModelBody, "about"),
    ("/admin/reset_prefix_cache", status.reset_prefix_cache, None, "about"),
    *loras.WRITES,
    *llama.WRITES,
    *sglang.WRITES,
    *ollama.WRITES,
    *tgi.WRITES,
]
BODY_HANDLERS = {path: handler for path, handler, body, _ in WRITES if body is not None and "{" not in path}
DELETES: list[tuple[str, Handler, type[BaseModel] | None, str]] = [
    ("/v1/responses/{id}", delete_response, None, "OpenAI"),
    ("/v1/files/{id}", delete_file, None, "OpenAI"),
    *ollama.DELETES,
]


def make_app(server: Server, ring: KeyRing, folder: Path | None = None) -> FastAPI:
    """Make the app; `folder` holds files and batches, without one there are none."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if batches_open is not None:
            await batches_open.start()
        yield
        if batches_open is not None:
            await batches_open.close()
        await server.close()

    app = FastAPI(
        title="Penstock", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url="/openapi.json"
    )
    app.state.server = server
    app.state.responses = ResponseStore()
    app.state.background = Background(app.state.responses)
    app.state.batches = batches_open = None if folder is None else open_batches(app, server, ring, folder)
    app.state.files = None if batches_open is None else batches_open.files
    app.state.bodies = BodyMemory(server.config.max_body_mb * MIB)
    bodies = [body for _, _, body, _ in (*WRITES, *DELETES) if body is not None]
    for path, handler, tag in READS:
        app.add_api_route(path, handler, methods=["GET"], tags=[tag], response_model=None, name=handler.__name__)
        app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False, response_model=None)
    for path, handler in PAGES:
        app.add_api_route(path, handler, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)
    for method, table in (("POST", WRITES), ("DELETE", DELETES)):
        for path, handler, body, tag in table:
            app.add_api_route(
                path,
                handler,
                methods=[method],
                tags=[tag],
                response_model=None,
                name=handler.__name__,
                openapi_extra=describe_body(body) if body else None,
            )
    app.openapi = lambda: make_document(app, bodies)  # type: ignore[method-assign]
    app.add_exception_handler(404, status.refuse_path)
    app.add_exception_handler(405, status.refuse_method)
    app.add_middleware(_BodyRoutes, handlers=BODY_HANDLERS)
    app.add_middleware(_Errors, server=server)
    app.add_middleware(WarningHeaders)
    access = app.state.router_access = make_router_access(server.config)
    app.add_middleware(AuthMiddleware, ring=ring, routes=app.routes, router=access)
    app.add_middleware(
        Limits,
        max_body_bytes=server.config.max_body_mb * MIB,
        max_upload_bytes=None if batches_open is None else batches_open.files.max_file_bytes + MAX_FORM_BYTES,
    )
    _add_checks(app, server.config)
    app.add_middleware(AnthropicErrors)
    app.add_middleware(AccessLogMiddleware, access=server.access, routes=app.routes)
    if server.config.root_path:
        app.add_middleware(RootPath, root_path=server.config.root_path)
    return app


def _add_checks(app: FastAPI, config: ServerConfig) -> None:
    """Check which pages and host names may call."""
    app.add_middleware(CheckMiddleware, check=OriginCheck(origins := read_origins(config.allowed_origins)))
    if origins:  # outermost: preflights have no key, and pages must be able to read errors
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], allow_private_network=True
        )
    app.add_middleware(CheckMiddleware, check=HostCheck(Hosts(config.host, config.allowed_hosts)))


class _BodyRoutes:
    """Innermost middleware: calls the handler of a POST with a body past the router, which tries all routes in turn."""

    def __init__(self, app: Any, handlers: Mapping[str, Handler]) -> None:
        self._app, self._handlers = app, handlers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        handler = self._handlers.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if handler is None:
            await self._app(scope, receive, send)
        else:
            response = await handler(Request(scope, receive, send))
            await response(scope, receive, send)


class _Errors:
    """Middleware that turns exceptions of routes into responses."""

    def __init__(self, app: Any, server: Server) -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        has_begun, refusal = False, None

        async def track(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, track)
        except Exception as error:
            known = to_api_error(error)
            if known.status >= 500:
                log.error(
                    "%s %s failed: %s",
                    scope.get("method"),
                    quote(scope.get("path")),
                    " ".join(str(error)[:MAX_MESSAGE_CHARS].split()),
                    exc_info=not known.code,
                )
            if known.status in (429, 503):
                self._server.metrics.count_refusal(known.status)
            if has_begun:
                raise
            known.__traceback__ = known.__context__ = None  # drop frames that hold the body
            refusal = known.response(scope["path"])
        finally:
            await release_body(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
