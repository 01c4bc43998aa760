"""The application: which routes there are and what stands before them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from penstock.errors import shown
from penstock.server import about, docs
from penstock.server.access import Accounted
from penstock.server.anthropic.body import CountTokensBody, MessagesBody
from penstock.server.anthropic.errors import AnthropicErrors
from penstock.server.anthropic.routes import count_tokens, messages
from penstock.server.batches.body import BatchBody
from penstock.server.batches.open import open_batches
from penstock.server.batches.routes import batch, batches, cancel_batch, create_batch
from penstock.server.chat import chat_completions
from penstock.server.chat_body import ChatBody
from penstock.server.completion_body import CompletionBody
from penstock.server.completions import completions
from penstock.server.config import MIB
from penstock.server.context import Handler, release
from penstock.server.document import described, document
from penstock.server.embeddings import EmbeddingBody, RerankBody, ScoreBody, embeddings, rerank, score
from penstock.server.errors import MAX_MESSAGE_CHARS, as_api_error
from penstock.server.files.routes import MAX_FORM_BYTES, delete_file, file, file_content, files, upload_file
from penstock.server.gate import Gate
from penstock.server.hosts import HostCheck, make_hosts
from penstock.server.infill import infill
from penstock.server.infill_body import InfillBody
from penstock.server.keys import KeyRing
from penstock.server.limits import Limits
from penstock.server.notices import Notices
from penstock.server.ollama import routes as ollama
from penstock.server.origins import OriginCheck, read_origins
from penstock.server.refuser import Refuser
from penstock.server.responses.background import Background
from penstock.server.responses.body import InputTokensBody, ResponsesBody
from penstock.server.responses.routes import (
    cancel_response,
    delete_response,
    input_items,
    input_tokens,
    response,
    responses,
)
from penstock.server.responses.store import ResponseStore
from penstock.server.room import BodyRoom
from penstock.server.state import Server
from penstock.server.tgi import routes as tgi
from penstock.server.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize
from penstock.version import VERSION

log = logging.getLogger("penstock.server")

READS: list[tuple[str, Handler, str]] = [
    ("/health", about.ready, "health"),
    ("/health/live", about.live, "health"),
    ("/health/ready", about.ready, "health"),
    ("/version", about.version, "health"),
    ("/v1/models", about.models, "models"),
    ("/v1/models/{name:path}", about.model, "models"),
    ("/info", about.info, "about"),
    ("/metrics", about.metrics, "about"),
    ("/admin/running", about.running, "about"),
    ("/v1/responses/{id}", response, "OpenAI"),
    ("/v1/responses/{id}/input_items", input_items, "OpenAI"),
    ("/v1/files", files, "OpenAI"),
    ("/v1/files/{id}", file, "OpenAI"),
    ("/v1/files/{id}/content", file_content, "OpenAI"),
    ("/v1/batches", batches, "OpenAI"),
    ("/v1/batches/{id}", batch, "OpenAI"),
    *ollama.READS,
]
PAGES: list[tuple[str, Handler]] = [("/docs", docs.docs), ("/docs/{name}", docs.asset)]
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
    ("/infill", infill, InfillBody, "llama-server"),
    ("/tokenize", tokenize, TokenizeBody, "tokens"),
    ("/detokenize", detokenize, DetokenizeBody, "tokens"),
    ("/score", score, ScoreBody, "embeddings"),
    ("/v1/score", score, ScoreBody, "embeddings"),
    ("/rerank", rerank, RerankBody, "embeddings"),
    ("/v1/rerank", rerank, RerankBody, "embeddings"),
    ("/admin/reset_prefix_cache", about.reset_prefix_cache, None, "about"),
    *ollama.WRITES,
    *tgi.WRITES,
]
DELETES: list[tuple[str, Handler, type[BaseModel] | None, str]] = [
    ("/v1/responses/{id}", delete_response, None, "OpenAI"),
    ("/v1/files/{id}", delete_file, None, "OpenAI"),
    *ollama.DELETES,
]


def make_app(server: Server, ring: KeyRing, folder: Path | None = None) -> FastAPI:
    """`folder` is for files and batches; without one there are none."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if kept is not None:
            await kept.start()
        yield
        if kept is not None:
            await kept.close()
        await server.close()

    app = FastAPI(
        title="Penstock", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url="/openapi.json"
    )
    app.state.server = server
    app.state.responses = ResponseStore()
    app.state.background = Background(app.state.responses)
    app.state.batches = kept = None if folder is None else open_batches(app, server, ring, folder)
    app.state.files = None if kept is None else kept.files
    app.state.bodies = BodyRoom(server.config.max_body_mb * MIB)
    bodies = [body for _, _, body, _ in (*WRITES, *DELETES) if body is not None]
    for path, handler, tag in READS:
        app.add_api_route(path, handler, methods=["GET"], tags=[tag], response_model=None, name=handler.__name__)
        app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False, response_model=None)
    for path, handler in PAGES:
        app.add_api_route(path, handler, methods=["GET"], include_in_schema=False, response_model=None)
    for method, table in (("POST", WRITES), ("DELETE", DELETES)):
        for path, handler, body, tag in table:
            app.add_api_route(
                path,
                handler,
                methods=[method],
                tags=[tag],
                response_model=None,
                name=handler.__name__,
                openapi_extra=described(body) if body else None,
            )
    app.openapi = lambda: document(app, bodies)  # type: ignore[method-assign]
    app.add_exception_handler(404, about.not_found)
    app.add_exception_handler(405, about.wrong_method)
    app.add_middleware(_Errors, server=server)
    app.add_middleware(Notices)
    app.add_middleware(Gate, ring=ring, routes=app.routes)
    app.add_middleware(
        Limits,
        max_body_bytes=server.config.max_body_mb * MIB,
        max_upload_bytes=None if kept is None else kept.files.max_file_bytes + MAX_FORM_BYTES,
    )
    origins = read_origins(server.config.allowed_origins)
    app.add_middleware(Refuser, check=OriginCheck(origins))
    if origins:  # outside: a preflight has no key, and refusals are for pages to read
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], allow_private_network=True
        )
    app.add_middleware(Refuser, check=HostCheck(make_hosts(server.config)))
    app.add_middleware(AnthropicErrors)
    app.add_middleware(Accounted, access=server.access, routes=app.routes)
    return app


class _Errors:
    """Every exception of a route as a response in the shape its clients know."""

    def __init__(self, app: Any, server: Server) -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        begun, refusal = False, None

        async def sent(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception as error:
            known = as_api_error(error)
            if known.status >= 500:
                log.error(
                    "%s %s failed: %s",
                    scope.get("method"),
                    shown(scope.get("path")),
                    " ".join(str(error)[:MAX_MESSAGE_CHARS].split()),
                    exc_info=not known.code,
                )
            if known.status in (429, 503):
                self._server.metrics.refused(known.status)
            if begun:
                raise
            known.__traceback__ = known.__context__ = None  # they hold the body
            refusal = known.response(scope["path"])
        finally:
            await release(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
