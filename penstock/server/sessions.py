"""`/v1/sessions/save` and `/v1/sessions/erase`: a client's own sessions, whose prefixes the cache keeps for a while."""

from __future__ import annotations

import asyncio

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.messages import EraseSession, SaveSession
from penstock.errors import quote
from penstock.server.common.fields import MAX_SESSION_CHARS, RequestBody
from penstock.server.http.context import client_of, json_response, read_body, server_of
from penstock.server.http.errors import ApiError


class SessionBody(RequestBody):
    """Name a session of a model."""

    session: str = Field(min_length=1, max_length=MAX_SESSION_CHARS)
    model: str | None = None


async def save(request: Request) -> Response:
    """Put a session's prefix into the store now, so that it outlives the engine."""
    return await _tell(request, SaveSession)


async def erase(request: Request) -> Response:
    """Let a session's prefix be evicted as any other."""
    return await _tell(request, EraseSession)


async def _tell(request: Request, kind: type[SaveSession | EraseSession]) -> Response:
    body = await read_body(request, SessionBody)
    model = await server_of(request).catalog.open(body.model)
    message = kind(client_of(request).tenant, body.session)
    asked = (engine.controls.ask(message) for engine in model.running.engines)
    answers = await asyncio.gather(*asked)
    for answer in answers:
        if answer.error is not None:
            raise ApiError(400, answer.error, param="session")
    found = sum(int(answer.values["num_positions"]) for answer in answers)
    if not found:
        raise ApiError(404, f"there is no session {quote(body.session)}: send a request with it first", param="session")
    return json_response({"session": body.session, "num_tokens": found})
