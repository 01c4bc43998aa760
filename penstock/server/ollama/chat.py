"""POST /api/chat, /api/generate, /api/embed and /api/embeddings."""

from __future__ import annotations

import time
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.common.chat_prompt import ChatPrompt
from penstock.server.common.fields import SamplingBody, make_sampling_params
from penstock.server.common.message_builder import MessageBuilder
from penstock.server.common.structured_outputs import read_constraint
from penstock.server.http.context import (
    cancel_on_disconnect,
    client_of,
    event_stream,
    json_response,
    read_body,
    run_on_body,
    server_of,
    start_generation,
)
from penstock.server.http.errors import ApiError, validate, warn
from penstock.server.http.keys import admin_only
from penstock.server.model import ServedModel
from penstock.server.ollama.answer import MEDIA_TYPE, LineHead, OllamaAnswer, RequestClock, encode_failure
from penstock.server.ollama.bodies import (
    OllamaAnswerBody,
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaModelBody,
    make_defaults,
)
from penstock.server.ollama.models import find_lora, find_model
from penstock.server.openai.chat_body import ChatBody
from penstock.server.openai.completions import CompletionBody
from penstock.server.openai.embeddings import PoolBody, normalize
from penstock.server.openai.embeddings import embed as compute_vectors
from penstock.server.openai.infill import encode_infill, find_infill_tokens, make_infill_room, stop_at_infill_end
from penstock.text.chat.reasoning import detect_kind
from penstock.text.infill import Gap
from penstock.types import SamplingParams


async def chat(request: Request) -> Response:
    clock = RequestClock(time.monotonic())
    body = await read_body(request, OllamaChat)
    model = find_model(server_of(request).catalog, body.model, body.name)
    if not body.messages:
        return await load_or_unload(request, body, model, LineHead(body.model or model.name, chats=True))
    await load(request, body, model, clock)
    asked = await run_on_body(
        request,
        lambda: validate(ChatBody, body.to_chat([message.to_openai() for message in body.messages], body.tools)),
    )
    chat_prompt = await cancel_on_disconnect(
        request, ChatPrompt.prepare(asked, model, client_of(request).tenant, make_defaults(model))
    )
    return await answer(request, body, asked, model, chat_prompt, clock, chats=True)


async def generate(request: Request) -> Response:
    clock = RequestClock(time.monotonic())
    body = await read_body(request, OllamaGenerate)
    model = find_model(server_of(request).catalog, body.model, body.name)
    if not body.prompt and not body.suffix:
        return await load_or_unload(request, body, model, LineHead(body.model or model.name, chats=False))
    await load(request, body, model, clock)
    has_template = model.tokenizer is not None and model.tokenizer.chat_template is not None and not body.raw
    asked: SamplingBody
    if body.suffix:
        asked = validate(CompletionBody, {**body.to_common(), "prompt": body.prompt})
        chat_prompt = await cancel_on_disconnect(
            request, _prepare_infill(asked, body, model, client_of(request).tenant)
        )
    elif has_template:
        asked = validate(ChatBody, body.to_chat(body.messages()))
        chat_prompt = await cancel_on_disconnect(
            request, ChatPrompt.prepare(asked, model, client_of(request).tenant, make_defaults(model))
        )
    else:
        prompt = f"{body.system}\n\n{body.prompt}" if body.system and not body.raw else body.prompt
        asked = validate(CompletionBody, {**body.to_common(), "prompt": prompt})
        chat_prompt = await cancel_on_disconnect(request, _prepare_raw(asked, body, model, client_of(request).tenant))
    return await answer(request, body, asked, model, chat_prompt, clock, chats=False)


async def _prepare_infill(asked: CompletionBody, body: OllamaGenerate, model: ServedModel, tenant: str) -> ChatPrompt:
    """Encode the text around a gap; long ones keep the part next to it."""
    infill_tokens = find_infill_tokens(model, "suffix")
    room = make_infill_room(model, body.options_or_default.max_tokens(model.text.intake.longest // 2))
    encoded = await encode_infill(model, Gap(body.prompt, body.suffix or ""), room, tenant=tenant)
    return ChatPrompt(encoded, stop_at_infill_end(_make_raw_params(asked, body, model), infill_tokens))


async def _prepare_raw(asked: CompletionBody, body: OllamaGenerate, model: ServedModel, tenant: str) -> ChatPrompt:
    """Encode a prompt without a template."""
    encoded = await model.text.encode(asked.prompts()[0], tenant=tenant)
    return ChatPrompt(encoded, _make_raw_params(asked, body, model))


def _make_raw_params(asked: CompletionBody, body: OllamaGenerate, model: ServedModel) -> SamplingParams:
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    return make_sampling_params(
        asked, make_defaults(model), max_tokens=None, logprobs=num_top, structured_outputs=read_constraint(asked)
    )


async def answer(
    request: Request,
    body: OllamaAnswerBody,
    asked: SamplingBody,
    model: ServedModel,
    chat_prompt: ChatPrompt,
    clock: RequestClock,
    *,
    chats: bool,
) -> Response:
    _check_thinking(body, model)
    room = model.text.intake.longest - len(chat_prompt.encoded.tokens)
    chat_prompt = replace(
        chat_prompt, params=chat_prompt.params.clone(max_tokens=body.options_or_default.max_tokens(room))
    )
    asked.model = find_lora(server_of(request).catalog, body.model, body.name)
    generation = await start_generation(request, model, asked, [(chat_prompt.encoded, chat_prompt.params)])
    head = LineHead(body.model or model.name, chats)
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    response = OllamaAnswer(head, MessageBuilder(chat_prompt), generation, clock, num_top)
    if body.streams:
        return await event_stream(request, response.lines(), encode_failure, MEDIA_TYPE)
    return json_response(await cancel_on_disconnect(request, response.collect()))


def _check_thinking(body: OllamaAnswerBody, model: ServedModel) -> None:
    template = model.tokenizer.chat_template if model.tokenizer else None
    if body.think and detect_kind(template) is None:
        raise ApiError(400, f"{model.name!r} does not support thinking: leave 'think' out", param="think")


async def load(request: Request, body: OllamaModelBody, model: ServedModel, clock: RequestClock) -> None:
    begun = time.monotonic()
    await cancel_on_disconnect(request, server_of(request).catalog.open(model.name))
    clock.load_s = time.monotonic() - begun
    for text in body.options_or_default.list_warnings(model.facts.max_model_len):
        warn(request, text)
    set_keep_alive(request, body, model)


def set_keep_alive(request: Request, body: OllamaModelBody, model: ServedModel) -> None:
    """Set how long a model stays loaded. It concerns the whole server, so only an admin may."""
    if body.keep_alive is not None and client_of(request).is_admin:
        model.keep_alive_s = float(body.keep_alive)


async def load_or_unload(request: Request, body: OllamaModelBody, model: ServedModel, head: LineHead) -> Response:
    """Answer a body without a prompt as Ollama does: load or unload the model."""
    if body.unloads:
        if not client_of(request).is_admin:
            raise admin_only()
        set_keep_alive(request, body, model)
        return json_response(head.format_empty("unload"))
    await load(request, body, model, RequestClock(time.monotonic()))
    return json_response(head.format_empty("load"))


async def embed(request: Request) -> Response:
    clock = RequestClock(time.monotonic())
    body = await read_body(request, OllamaEmbed)
    texts = [body.input] if isinstance(body.input, str) else body.input
    model = find_model(server_of(request).catalog, body.model, body.name)
    await load(request, body, model, clock)
    length = None if body.truncate is False else model.facts.max_model_len
    lora = find_lora(server_of(request).catalog, body.model, body.name)
    vectors: list[list[float]] = []
    num_tokens = 0
    if texts:
        vectors, num_tokens, _ = await compute_vectors(request, _make_body(lora or model.name, length), list(texts))
    return json_response(
        {
            "model": body.model or model.name,
            "embeddings": [normalize(vector[: body.dimensions]) for vector in vectors],
            **clock.durations(),
            "prompt_eval_count": num_tokens,
        }
    )


async def embeddings(request: Request) -> Response:
    body = await read_body(request, OllamaEmbeddings)
    model = find_model(server_of(request).catalog, body.model, body.name)
    await load(request, body, model, RequestClock(time.monotonic()))
    lora = find_lora(server_of(request).catalog, body.model, body.name)
    asked = _make_body(lora or model.name, model.facts.max_model_len)
    vectors, _, _ = await compute_vectors(request, asked, [body.prompt])
    return json_response({"embedding": vectors[0]})


def _make_body(model: str, length: int | None) -> PoolBody:
    cut = {} if length is None else {"truncate_prompt_tokens": length}
    return PoolBody.model_validate({"model": model, **cut})
