"""/api/chat and /api/generate."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.chat_body import ChatBody
from penstock.server.completion_body import CompletionBody
from penstock.server.context import aside, begin, client_of, event_stream, json_response, read, server_of, unless_gone
from penstock.server.conversation import Conversation
from penstock.server.errors import ApiError, invalid_body
from penstock.server.fields import SamplingBody, sampling_params
from penstock.server.gaps import encode_gap, end_with_gap, find_marks, room_for
from penstock.server.gate import admin_only
from penstock.server.model import ServedModel
from penstock.server.notices import warn
from penstock.server.ollama.answer import MEDIA_TYPE, Clock, Head, OllamaAnswer, failed
from penstock.server.ollama.bodies import OllamaAnswerBody, OllamaChat, OllamaGenerate, OllamaModelBody
from penstock.server.ollama.names import find_model
from penstock.server.ollama.options import own_defaults
from penstock.server.structure import structure
from penstock.server.turn import Turn
from penstock.text.infill import Gap
from penstock.text.reasoning import detect_kind
from penstock.types import SamplingParams

Kind = TypeVar("Kind", bound=BaseModel)


async def chat(request: Request) -> Response:
    clock = Clock(time.monotonic())
    body = await read(request, OllamaChat)
    model = find_model(server_of(request).catalog, body.model, body.name)
    if not body.messages:
        return await only_load(request, body, model, Head(body.model or model.name, chats=True))
    await load(request, body, model, clock)
    asked = await aside(
        request, lambda: translated(ChatBody, body.chat([message.openai() for message in body.messages], body.tools))
    )
    conversation = await unless_gone(
        request, Conversation.prepare(asked, model, client_of(request).tenant, own_defaults(model))
    )
    return await answer(request, body, asked, model, conversation, clock, chats=True)


async def generate(request: Request) -> Response:
    clock = Clock(time.monotonic())
    body = await read(request, OllamaGenerate)
    model = find_model(server_of(request).catalog, body.model, body.name)
    if not body.prompt and not body.suffix:
        return await only_load(request, body, model, Head(body.model or model.name, chats=False))
    await load(request, body, model, clock)
    templated = model.tokenizer is not None and model.tokenizer.chat_template is not None and not body.raw
    asked: SamplingBody
    if body.suffix:
        asked = translated(CompletionBody, {**body.common(), "prompt": body.prompt})
        conversation = await unless_gone(request, _between(asked, body, model, client_of(request).tenant))
    elif templated:
        asked = translated(ChatBody, body.chat(body.messages()))
        conversation = await unless_gone(
            request, Conversation.prepare(asked, model, client_of(request).tenant, own_defaults(model))
        )
    else:
        prompt = f"{body.system}\n\n{body.prompt}" if body.system and not body.raw else body.prompt
        asked = translated(CompletionBody, {**body.common(), "prompt": prompt})
        conversation = await unless_gone(request, _plain(asked, body, model, client_of(request).tenant))
    return await answer(request, body, asked, model, conversation, clock, chats=False)


def translated(kind: type[Kind], values: dict[str, Any]) -> Kind:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise invalid_body(error) from None


async def _between(asked: CompletionBody, body: OllamaGenerate, model: ServedModel, tenant: str) -> Conversation:
    """Ask for the text between a prompt and its suffix; of long ones the part next to the gap is read."""
    marks = find_marks(model, "suffix")
    room = room_for(model, body.asked.max_tokens(model.taking.longest // 2))
    encoded = await encode_gap(model, Gap(body.prompt, body.suffix or ""), room, tenant=tenant)
    return Conversation(encoded, end_with_gap(_plain_params(asked, body, model), marks))


async def _plain(asked: CompletionBody, body: OllamaGenerate, model: ServedModel, tenant: str) -> Conversation:
    """A prompt without a template, as a conversation that has none."""
    encoded = await model.encode(asked.prompts()[0], tenant=tenant)
    return Conversation(encoded, _plain_params(asked, body, model))


def _plain_params(asked: CompletionBody, body: OllamaGenerate, model: ServedModel) -> SamplingParams:
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    return sampling_params(
        asked, own_defaults(model), max_tokens=None, logprobs=num_top, structured_outputs=structure(asked)
    )


async def answer(
    request: Request,
    body: OllamaAnswerBody,
    asked: SamplingBody,
    model: ServedModel,
    conversation: Conversation,
    clock: Clock,
    *,
    chats: bool,
) -> Response:
    _check_thinking(body, model)
    room = model.taking.longest - len(conversation.encoded.tokens)
    conversation = replace(conversation, params=conversation.params.clone(max_tokens=body.asked.max_tokens(room)))
    generation = await begin(request, model, asked, [(conversation.encoded, conversation.params)])
    head = Head(body.model or model.name, chats)
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    said = OllamaAnswer(head, Turn(conversation), generation, clock, num_top)
    if body.streams:
        return await event_stream(request, said.lines(), failed, MEDIA_TYPE)
    return json_response(await unless_gone(request, said.whole()))


def _check_thinking(body: OllamaAnswerBody, model: ServedModel) -> None:
    template = model.tokenizer.chat_template if model.tokenizer else None
    if body.think and detect_kind(template) is None:
        raise ApiError(400, f"{model.name!r} does not support thinking: leave 'think' out", param="think")


async def load(request: Request, body: OllamaModelBody, model: ServedModel, clock: Clock) -> None:
    begun = time.monotonic()
    await unless_gone(request, server_of(request).catalog.open(model.name))
    clock.load_s = time.monotonic() - begun
    for text in body.asked.notices(model.facts.max_model_len):
        warn(request, text)
    keep(request, body, model)


def keep(request: Request, body: OllamaModelBody, model: ServedModel) -> None:
    """Set how long a model stays. That is for the whole server: only the admin's say counts."""
    if body.keep_alive is not None and client_of(request).is_admin:
        model.keep_alive_s = float(body.keep_alive)


async def only_load(request: Request, body: OllamaModelBody, model: ServedModel, head: Head) -> Response:
    """What Ollama makes of a body without a prompt."""
    if body.unloads:
        if not client_of(request).is_admin:
            raise admin_only()
        keep(request, body, model)
        return json_response(head.nothing("unload"))
    await load(request, body, model, Clock(time.monotonic()))
    return json_response(head.nothing("load"))
