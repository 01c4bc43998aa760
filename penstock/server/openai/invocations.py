"""SageMaker's routes: POST /invocations answers any body by the route that its fields belong to."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from penstock.server.http.context import Handler, receive_body, release_body
from penstock.server.http.errors import ApiError
from penstock.server.openai.chat import chat_completions
from penstock.server.openai.completions import completions
from penstock.server.openai.embeddings import embeddings, rerank, score

HANDLERS: tuple[tuple[str, Handler], ...] = (  # the first whose field the body has
    ("messages", chat_completions),
    ("prompt", completions),
    ("documents", rerank),
    ("text_1", score),
    ("input", embeddings),
)


async def invoke(request: Request) -> Response:
    raw = bytes(await receive_body(request))
    await release_body(request.scope)  # the handler reads it again
    try:
        names = set(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))
    except msgspec.DecodeError:
        names = set()
    handler = next((handler for name, handler in HANDLERS if name in names), None)
    if handler is None:
        known = ", ".join(name for name, _ in HANDLERS)
        raise ApiError(400, f"the body has none of the fields {known}: send an object with one of them")
    waiting: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> Message:
        return waiting.pop() if waiting else await request.receive()

    return await handler(Request(request.scope, receive))
