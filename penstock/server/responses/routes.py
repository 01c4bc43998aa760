"""/v1/responses, and the responses that are kept."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

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
from penstock.server.responses.answer import ResponseAnswer
from penstock.server.responses.body import InputBody, InputTokensBody, ResponsesBody
from penstock.server.responses.items import Item
from penstock.server.responses.store import Kept, ResponseStore, encode
from penstock.server.responses.translate import fitted, to_chat

MOST_LISTED = 100


async def responses(request: Request) -> Response:
    body = await read(request, ResponsesBody)
    server, client, store = server_of(request), client_of(request), _store(request)
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
    if request.query_params.get("stream") == "true":
        raise ApiError(400, "a response that is kept is not streamed: leave stream out", param="stream")
    return Response(_kept(request).response, media_type="application/json")


async def delete_response(request: Request) -> Response:
    id = request.path_params["id"]
    _store(request).forget(client_of(request).tenant, id)
    return json_response({"id": id, "object": "response", "deleted": True})


async def input_items(request: Request) -> Response:
    kept = _kept(request)
    items = await room_of(request).run(lambda: msgspec.json.decode(kept.items))
    asked = request.query_params
    if asked.get("order", "desc") != "asc":
        items.reverse()
    ids = [item["id"] for item in items]
    if "after" in asked:
        if asked["after"] not in ids:
            raise ApiError(400, f"after={asked['after'][:80]!r} is none of the items", param="after")
        items = items[ids.index(asked["after"]) + 1:]
    limit = asked.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MOST_LISTED):
        raise ApiError(400, f"limit={limit[:80]!r} must be a number from 1 to {MOST_LISTED}", param="limit")
    page = items[:int(limit)]
    return json_response({"object": "list", "data": page, "first_id": page[0]["id"] if page else "",
                          "last_id": page[-1]["id"] if page else "", "has_more": len(items) > len(page)})


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


def _kept(request: Request) -> Kept:
    return _store(request).find(client_of(request).tenant, request.path_params["id"])


async def _earlier(request: Request, body: InputBody) -> list[Item]:
    if body.previous_response_id is None:
        return []
    kept = _store(request).find(client_of(request).tenant, body.previous_response_id, "previous_response_id")
    return await room_of(request).run(kept.conversation)
