"""/generate, /generate_stream and, for either, /."""

from __future__ import annotations

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.context import Handler, begin, client_of, event_stream, json_response, read, server_of, unless_gone
from penstock.server.fields import SamplingBody
from penstock.server.tgi.answer import TgiAnswer, failed
from penstock.server.tgi.bodies import TgiBody, TgiEitherBody, TgiStreamBody

PLAIN = SamplingBody.model_validate({})  # what TGI's bodies do not say


async def generate(request: Request) -> Response:
    answer = await _begin(request, await read(request, TgiBody))
    return json_response(await unless_gone(request, answer.whole()))


async def generate_stream(request: Request) -> Response:
    answer = await _begin(request, await read(request, TgiStreamBody))
    return await event_stream(request, answer.events(), failed)


async def generate_either(request: Request) -> Response:
    body = await read(request, TgiEitherBody)
    answer = await _begin(request, body)
    if body.stream:
        return await event_stream(request, answer.events(), failed)
    return json_response([await unless_gone(request, answer.whole())])


async def _begin(request: Request, body: TgiBody) -> TgiAnswer:
    """The default model's: TGI's bodies name none."""
    server = server_of(request)
    model = await server.catalog.open(None)
    parameters = body.parameters
    encoded = await unless_gone(
        request, model.encode(body.inputs, cut=parameters.truncate is not None, tenant=client_of(request).tenant)
    )
    num_prompt = min(len(encoded.tokens), parameters.truncate or len(encoded.tokens))
    params = parameters.sampling(model.taking.longest - num_prompt)
    return TgiAnswer(body, await begin(request, model, PLAIN, [(encoded, params)]))


TAG = "TGI"
WRITES: list[tuple[str, Handler, type[BaseModel] | None, str]] = [
    ("/generate", generate, TgiBody, TAG),
    ("/generate_stream", generate_stream, TgiStreamBody, TAG),
    ("/", generate_either, TgiEitherBody, TAG),
]
