"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from penstock.server import sse
from penstock.server.anthropic.answer import MessageAnswer
from penstock.server.anthropic.body import CountTokensBody, MessagesBody
from penstock.server.anthropic.errors import REQUEST_ID, failure
from penstock.server.anthropic.translate import to_chat
from penstock.server.context import aside, begin, client_of, event_stream, json_response, read, server_of, unless_gone
from penstock.server.conversation import Conversation, warn_of_budget
from penstock.server.fields import WHOLE


async def messages(request: Request) -> Response:
    body = await read(request, MessagesBody)
    server = server_of(request)
    model = await server.catalog.open(body.model)
    chat = await aside(request, lambda: to_chat(body))
    conversation = await unless_gone(request, Conversation.prepare(chat, model, client_of(request).tenant))
    warn_of_budget(request, chat, conversation)
    fills = len(conversation.encoded.tokens) + max(1, body.max_tokens) > model.facts.max_model_len
    if fills:  # max_tokens must be given here, so that clients give more than there is room for
        conversation = replace(conversation, params=conversation.params.clone(max_tokens=None))
    generation = await begin(request, model, chat, [(conversation.encoded, conversation.params)])
    answer = MessageAnswer(body, conversation, generation, fills=fills)
    if body.stream:
        return await event_stream(
            request, answer.events(), lambda error: sse.named_event("error", failure(error, request.scope[REQUEST_ID]))
        )
    return json_response(await unless_gone(request, answer.whole()))


async def count_tokens(request: Request) -> Response:
    body = await read(request, CountTokensBody)
    model = await server_of(request).catalog.open(body.model)
    asked = await aside(request, lambda: to_chat(body))
    chat = asked.model_copy(update={"truncate_prompt_tokens": WHOLE})  # any length can be counted
    conversation = await unless_gone(request, Conversation.prepare(chat, model, client_of(request).tenant))
    return json_response({"input_tokens": len(conversation.encoded.tokens)})
