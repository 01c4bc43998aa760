"""`/v1/sessions/save`, `restore` and `erase`: a client's own sessions, whose prefixes the cache keeps for a while."""

from __future__ import annotations

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.common.fields import MAX_SESSION_CHARS, RequestBody, SamplingBody
from penstock.server.http.context import json_response, read_body, server_of
from penstock.server.sessions import keep
from penstock.server.sessions.keep import SessionCall


class SessionBody(RequestBody):
    """Name a session of a model."""

    session: str = Field(min_length=1, max_length=MAX_SESSION_CHARS)
    model: str | None = None


class RestoreBody(SessionBody):
    """Name a saved session, and what its requests had."""

    session_ttl: float = Field(600.0, gt=0, le=86400)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)


async def save(request: Request) -> Response:
    """Put a session's prefix into the store now, so that it outlives the engine."""
    body = await read_body(request, SessionBody)
    return json_response({"session": body.session, "num_tokens": await keep.save(await _open(request, body))})


async def restore(request: Request) -> Response:
    """Have a saved session's prefix in the cache again, kept as that of a request with it."""
    body = await read_body(request, RestoreBody)
    num_tokens, num_found = await keep.restore(await _open(request, body))
    return json_response({"session": body.session, "num_tokens": num_tokens, "num_cached_tokens": num_found})


async def erase(request: Request) -> Response:
    """Let a session's prefix be evicted as any other, and forget that it was saved."""
    body = await read_body(request, SessionBody)
    return json_response({"session": body.session, "num_tokens": await keep.erase(await _open(request, body))})


async def _open(request: Request, body: SessionBody) -> SessionCall:
    model = await server_of(request).catalog.open(body.model)
    asked = SamplingBody.model_validate(body.model_dump(exclude_unset=True))
    return SessionCall(request, model, body.session, body.session, asked)
