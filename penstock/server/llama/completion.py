"""POST /completion and /completions, as in llama-server."""

from __future__ import annotations

from pydantic import model_validator
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.common.prompts import AnyPrompt, encode_prompts, is_one_prompt, list_prompts
from penstock.server.http.context import (
    cancel_on_disconnect,
    client_of,
    event_stream,
    json_response,
    read_body,
    server_of,
    start_generation,
)
from penstock.server.llama.answer import NativeAnswer, encode_failure
from penstock.server.llama.body import NativeBody, make_native_params


class NativeCompletionBody(NativeBody):
    """Fields of /completion; several prompts are answered by a list."""

    prompt: AnyPrompt

    @model_validator(mode="after")
    def _check_prompts(self) -> NativeCompletionBody:
        list_prompts(self.prompt)
        return self


async def complete(request: Request) -> Response:
    body = await read_body(request, NativeCompletionBody)
    model, tenant = await server_of(request).catalog.open(body.model), client_of(request).tenant
    params = await make_native_params(body, model, tenant)
    work = encode_prompts(model.text, list_prompts(body.prompt), tenant=tenant)
    prompts = await cancel_on_disconnect(request, work)
    generation = await start_generation(request, model, body, [(encoded, params) for encoded in prompts])
    answer = NativeAnswer(body, generation, not is_one_prompt(body.prompt) or (body.n or 1) > 1)
    if body.stream:
        return await event_stream(request, answer.events(), encode_failure)
    return json_response(await cancel_on_disconnect(request, answer.collect()))
