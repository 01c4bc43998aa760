"""/v1/responses, and the responses that are kept."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from operator import itemgetter
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import shown
from penstock.server.context import (
    aside,
    begin,
    client_of,
    event_stream,
    json_response,
    read,
    room_of,
    server_of,
    unless_gone,
)
from penstock.server.conversation import Conversation
from penstock.server.errors import ApiError
from penstock.server.fields import WHOLE
from penstock.server.files.listing import page_of
from penstock.server.responses.answer import ResponseAnswer
from penstock.server.responses.background import Background, Running, join_some, no_events
from penstock.server.responses.body import InputBody, InputTokensBody, ResponsesBody
from penstock.server.responses.items import Item
from penstock.server.responses.store import Kept, ResponseStore, encode
from penstock.server.responses.translate import fitted, to_chat

MAX_LISTED, LISTED = 100, 20


async def responses(request: Request) -> Response:
    body = await read(request, ResponsesBody)
    server, client, store = server_of(request), client_of(request), _store(request)
    if body.background:
        _background(request).check_room(client.tenant)
    earlier = await _earlier(request, body)
    model = await server.catalog.open(body.model)
    chat = await aside(request, lambda: to_chat(body, earlier))
    prepare = fitted if body.truncation == "auto" else Conversation.prepare
    conversation = await unless_gone(request, prepare(chat, model, client.tenant))
    items = await aside(request, lambda: encode([*earlier, *body.items])) if body.store is not False else b"[]"
    generation = await begin(request, model, chat, [(conversation.encoded, conversation.params)])

    def keep(response: dict[str, Any]) -> None:
        store.keep(client.tenant, response, items)

    answer = ResponseAnswer(body, conversation, generation, keep)
    if body.background:
        running = _background(request).begin(client.tenant, answer, items)
        return (
            json_response(running.as_json())
            if running.log is None
            else await event_stream(request, running.log.follow())
        )
    if body.stream:
        return await event_stream(request, answer.events(), answer.failed)
    return json_response(await unless_gone(request, answer.whole()))


async def input_tokens(request: Request) -> Response:
    body = await read(request, InputTokensBody)
    model = await server_of(request).catalog.open(body.model)
    earlier = await _earlier(request, body)
    chat = (await aside(request, lambda: to_chat(body, earlier))).model_copy(update={"truncate_prompt_tokens": WHOLE})
    prepare = fitted if body.truncation == "auto" else Conversation.prepare
    conversation = await unless_gone(request, prepare(chat, model, client_of(request).tenant))
    return json_response({"object": "response.input_tokens", "input_tokens": len(conversation.encoded.tokens)})


async def response(request: Request) -> Response:
    running = _running(request)
    if request.query_params.get("stream") == "true":
        return await event_stream(request, _events(request, running, _number(request, "starting_after")))
    if running is not None:
        return json_response(running.as_json())
    return Response(_kept(request).response, media_type="application/json")


async def _events(request: Request, running: Running | None, after: int) -> AsyncGenerator[bytes, None]:
    if running is None:
        events = _kept(request).events
        if not events:
            raise no_events()
        at = after + 1
        while at < len(events):
            count, piece = join_some(events, at)
            at += count
            yield piece
    elif running.log is None:
        raise no_events()
    else:
        async for event in running.log.follow(after):
            yield event


def _number(request: Request, name: str) -> int:
    """A number of an event; -1, which is before the first, where none is given."""
    given = request.query_params.get(name)
    if given is None:
        return -1
    if not (given.isascii() and given.isdigit() and len(given) <= 9):
        raise ApiError(
            400,
            f"{name}={shown(given)}: give the sequence_number of the last event that came",
            param=name,
            code="invalid_value",
        )
    return int(given)


async def cancel_response(request: Request) -> Response:
    running = _running(request)
    if running is not None:
        await _background(request).cancel(running)
    kept = _kept(request).response
    if not msgspec.json.decode(kept, type=_Made).background:
        raise ApiError(
            400,
            "this response was not made with background=true, so it cannot be cancelled: close the connection instead",
            code="not_in_background",
        )
    return Response(kept, media_type="application/json")


class _Made(msgspec.Struct):
    background: bool = False


async def delete_response(request: Request) -> Response:
    id = request.path_params["id"]
    running = _running(request)
    if running is not None:
        await _background(request).cancel(running)
    _store(request).forget(client_of(request).tenant, id)
    return json_response({"id": id, "object": "response", "deleted": True})


async def input_items(request: Request) -> Response:
    kept = _kept(request)
    items = await room_of(request).run(lambda: msgspec.json.decode(kept.items))
    return json_response(page_of(items, dict, request.query_params, MAX_LISTED, LISTED, itemgetter("id")))


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


def _background(request: Request) -> Background:
    background: Background = request.app.state.background
    return background


def _running(request: Request) -> Running | None:
    return _background(request).find(client_of(request).tenant, request.path_params["id"])


def _kept(request: Request) -> Kept:
    return _store(request).find(client_of(request).tenant, request.path_params["id"])


async def _earlier(request: Request, body: InputBody) -> list[Item]:
    if body.previous_response_id is None:
        return []
    if _background(request).find(client_of(request).tenant, body.previous_response_id) is not None:
        raise ApiError(
            400,
            f"the response {body.previous_response_id} has not ended: wait for it",
            param="previous_response_id",
            code="response_in_progress",
        )
    kept = _store(request).find(client_of(request).tenant, body.previous_response_id, "previous_response_id")
    return await room_of(request).run(kept.conversation)
