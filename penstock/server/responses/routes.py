"""/v1/responses, translated to chat bodies, and stored responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import quote
from penstock.server.common.chat_prompt import ChatHistory, ChatPrompt, make_chat_body
from penstock.server.common.fields import MAX_INT32
from penstock.server.files.routes import make_page
from penstock.server.http.context import (
    body_memory_of,
    cancel_on_disconnect,
    client_of,
    event_stream,
    json_response,
    read_body,
    run_on_body,
    server_of,
    start_generation,
)
from penstock.server.http.errors import ApiError
from penstock.server.http.relay import detach
from penstock.server.model import ServedModel
from penstock.server.openai.chat_body import ChatBody
from penstock.server.responses.answer import ResponseAnswer
from penstock.server.responses.background import (
    Background,
    BackgroundResponse,
    ResponseStore,
    StoredResponse,
    encode_items,
    join_events,
    make_no_events_error,
)
from penstock.server.responses.body import (
    InputBody,
    InputTokensBody,
    Item,
    ResponsesBody,
    add_to_history,
    translate_tools,
)

EFFORTS = {"max": "xhigh"}
MAX_LISTED, LISTED = 100, 20


def to_chat(body: InputBody, earlier: Sequence[Item] = ()) -> ChatBody:
    """Translate `body`; `earlier` are the items of preceding responses."""
    history = ChatHistory()
    if body.instructions:
        history.add_text("system", body.instructions)
    add_to_history([*earlier, *body.items], history)
    values: dict[str, Any] = {
        "model": body.model,
        "messages": history.messages(),
        "parallel_tool_calls": body.parallel_tool_calls,
        **translate_tools(body.tools, body.tool_choice),
    }
    if body.reasoning is not None and body.reasoning.effort is not None:
        values["reasoning_effort"] = EFFORTS.get(body.reasoning.effort, body.reasoning.effort)
    if body.text is not None and body.text.format is not None:
        values["response_format"] = body.text.format.to_chat()
    if isinstance(body, ResponsesBody):
        values |= {
            "max_completion_tokens": body.max_output_tokens,
            "stream": bool(body.stream),
            "temperature": body.temperature,
            "top_p": body.top_p,
            "user": body.user,
            "speculation": body.speculation,
            "include_applied": body.include_applied,
        }
        if body.wants_logprobs:
            values |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return make_chat_body(values)


async def fit_prompt(chat: ChatBody, model: ServedModel, tenant: str = "") -> ChatPrompt:
    """Drop the oldest turns until the prompt fits; leading system messages stay."""
    num_head = next((at for at, message in enumerate(chat.messages) if message.role not in ("system", "developer")), 0)
    starts = [at for at, message in enumerate(chat.messages) if message.role == "user"] or [num_head]
    room = model.facts.max_model_len - (chat.max_completion_tokens or 1)

    async def prepare_from(start: int) -> ChatPrompt:
        messages = [*chat.messages[:num_head], *chat.messages[start:]]
        made = await ChatPrompt.prepare(
            chat.model_copy(update={"messages": messages, "truncate_prompt_tokens": MAX_INT32}), model, tenant
        )
        return replace(made, encoded=replace(made.encoded, num_dropped_messages=start - num_head))

    best = await prepare_from(num_head)
    first, last = 1, len(starts) - 1  # the shortest cut lies between them
    if len(best.encoded.tokens) <= room:
        return best
    best = await prepare_from(starts[last])
    while first < last:
        middle = (first + last) // 2
        tried = await prepare_from(starts[middle])
        if len(tried.encoded.tokens) <= room:
            best, last = tried, middle
        else:
            first = middle + 1
    return best


async def responses(request: Request) -> Response:
    body = await read_body(request, ResponsesBody)
    server, client, store = server_of(request), client_of(request), _store(request)
    if body.background:
        detach(request.scope)
        _background(request).check_limit(client.tenant)
    earlier = await _load_earlier(request, body)
    model = await server.catalog.open(body.model)
    chat = await run_on_body(request, lambda: to_chat(body, earlier))
    chat.model = body.model
    prepare = fit_prompt if body.truncation == "auto" else ChatPrompt.prepare
    chat_prompt = await cancel_on_disconnect(request, prepare(chat, model, client.tenant))
    items = (
        await run_on_body(request, lambda: encode_items([*earlier, *body.items])) if body.store is not False else b"[]"
    )
    generation = await start_generation(request, model, chat, [(chat_prompt.encoded, chat_prompt.params)])

    def keep(response: dict[str, Any]) -> None:
        store.put(client.tenant, response, items)

    answer = ResponseAnswer(body, chat_prompt, generation, keep)
    server.traces.name(generation.trace, answer.id)
    if body.background:
        generation.trace.outlives_connection = True
        running = _background(request).start(client.tenant, answer, items)
        return (
            json_response(running.as_json())
            if running.log is None
            else await event_stream(request, running.log.follow())
        )
    if body.stream:
        return await event_stream(request, answer.events(), answer.encode_failure)
    return json_response(await cancel_on_disconnect(request, answer.collect()))


async def input_tokens(request: Request) -> Response:
    body = await read_body(request, InputTokensBody)
    model = await server_of(request).catalog.open(body.model)
    earlier = await _load_earlier(request, body)
    chat = (await run_on_body(request, lambda: to_chat(body, earlier))).model_copy(
        update={"truncate_prompt_tokens": MAX_INT32}
    )
    prepare = fit_prompt if body.truncation == "auto" else ChatPrompt.prepare
    chat_prompt = await cancel_on_disconnect(request, prepare(chat, model, client_of(request).tenant))
    return json_response({"object": "response.input_tokens", "input_tokens": len(chat_prompt.encoded.tokens)})


async def response(request: Request) -> Response:
    running = _find_running(request)
    if request.query_params.get("stream") == "true":
        return await event_stream(
            request, _stream_events(request, running, _read_sequence_number(request, "starting_after"))
        )
    if running is not None:
        return json_response(running.as_json())
    return Response(_find_stored(request).response, media_type="application/json")


async def _stream_events(
    request: Request, running: BackgroundResponse | None, after: int
) -> AsyncGenerator[bytes, None]:
    if running is None:
        events = _find_stored(request).events
        if not events:
            raise make_no_events_error()
        at = after + 1
        while at < len(events):
            count, piece = join_events(events, at)
            at += count
            yield piece
    elif running.log is None:
        raise make_no_events_error()
    else:
        async for event in running.log.follow(after):
            yield event


def _read_sequence_number(request: Request, name: str) -> int:
    """Read an event's sequence number; -1 if not given."""
    given = request.query_params.get(name)
    if given is None:
        return -1
    if not (given.isascii() and given.isdigit() and len(given) <= 9):
        raise ApiError(
            400,
            f"{name}={quote(given)}: give the sequence_number of the last event received",
            param=name,
            code="invalid_value",
        )
    return int(given)


async def cancel_response(request: Request) -> Response:
    running = _find_running(request)
    if running is not None:
        await _background(request).cancel(running)
    stored = _find_stored(request).response
    if not msgspec.json.decode(stored, type=_BackgroundFlag).background:
        raise ApiError(
            400,
            "only responses with background=true can be cancelled: close the connection instead",
            code="not_in_background",
        )
    return Response(stored, media_type="application/json")


class _BackgroundFlag(msgspec.Struct):
    background: bool = False


async def delete_response(request: Request) -> Response:
    id = request.path_params["id"]
    running = _find_running(request)
    if running is not None:
        await _background(request).cancel(running)
    _store(request).delete(client_of(request).tenant, id)
    return json_response({"id": id, "object": "response", "deleted": True})


async def input_items(request: Request) -> Response:
    stored = _find_stored(request)
    items = await body_memory_of(request).run(lambda: msgspec.json.decode(stored.items))
    return json_response(make_page(items, dict, request.query_params, MAX_LISTED, LISTED, itemgetter("id")))


def _store(request: Request) -> ResponseStore:
    return cast("ResponseStore", request.app.state.responses)


def _background(request: Request) -> Background:
    return cast("Background", request.app.state.background)


def _find_running(request: Request) -> BackgroundResponse | None:
    return _background(request).find(client_of(request).tenant, request.path_params["id"])


def _find_stored(request: Request) -> StoredResponse:
    return _store(request).find(client_of(request).tenant, request.path_params["id"])


async def _load_earlier(request: Request, body: InputBody) -> list[Item]:
    if body.previous_response_id is None:
        return []
    if _background(request).find(client_of(request).tenant, body.previous_response_id) is not None:
        raise ApiError(
            400,
            f"the response {body.previous_response_id} has not ended; wait for it",
            param="previous_response_id",
            code="response_in_progress",
        )
    stored = _store(request).find(client_of(request).tenant, body.previous_response_id, "previous_response_id")
    return await body_memory_of(request).run(stored.list_items)
