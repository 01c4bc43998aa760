"""SGLang's routes. TGI's /generate is the same path: a body with `inputs` is TGI's."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import PenstockError
from penstock.host.version import VERSION
from penstock.server import status
from penstock.server.common.fields import SamplingBody
from penstock.server.common.prompts import MAX_PROMPTS
from penstock.server.http.context import (
    Handler,
    cancel_on_disconnect,
    client_of,
    event_stream,
    json_response,
    new_id,
    read_body,
    server_of,
    start_generation,
)
from penstock.server.http.errors import ApiError, to_api_error
from penstock.server.http.keys import sees_all
from penstock.server.openai.embeddings import PoolBody, embed
from penstock.server.sglang.answer import SglangAnswer
from penstock.server.sglang.body import SglangBody
from penstock.server.tgi.routes import TgiBody, TgiParameters, answer_whole

ERROR_PATH = "/v1/"  # errors look like OpenAI's
TGI_FIELDS = ("inputs", "parameters")


class GenerateBody(SglangBody):
    """SGLang's fields, or TGI's `inputs` and `parameters`."""

    inputs: str | None = None
    parameters: TgiParameters = TgiParameters.model_validate({})

    @model_validator(mode="after")
    def _check_kind(self) -> GenerateBody:
        if self.inputs is None:
            self.check_prompts()
        elif self.text is not None or self.input_ids is not None:
            raise ValueError("give inputs, or text or input_ids")
        return self


class EncodeBody(PoolBody):
    """Fields of /encode."""

    text: str | list[str] | None = Field(None, max_length=MAX_PROMPTS)
    input_ids: list[int] | list[list[int]] | None = None

    @model_validator(mode="after")
    def _check_prompts(self) -> EncodeBody:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give either text or input_ids")
        return self


async def generate(request: Request) -> Response:
    try:
        body = await read_body(request, GenerateBody)
    except ApiError as error:
        if (error.param or "inputs").partition(".")[0] not in TGI_FIELDS:
            error.api_path = ERROR_PATH
        raise
    if body.inputs is not None:
        return await answer_whole(request, TgiBody(inputs=body.inputs, parameters=body.parameters))
    try:
        return await _generate(request, body)
    except (ApiError, PenstockError) as error:
        known = to_api_error(error)
        known.api_path = ERROR_PATH
        raise known from None


async def _generate(request: Request, body: SglangBody) -> Response:
    model = await server_of(request).catalog.open(body.adapter)
    encoding = model.text.encode_all(body.prompts(), tenant=client_of(request).tenant)
    encoded = await cancel_on_disconnect(request, encoding)
    prompts = [(one, body.to_sampling(number, model.defaults)) for number, one in enumerate(encoded)]
    asked = SamplingBody.model_validate({"model": body.adapter, "priority": body.priority})
    generation = await start_generation(request, model, asked, prompts)
    generation.includes_applied = body.include_applied
    answer = SglangAnswer(body, generation)
    if body.stream:
        return await event_stream(request, answer.events())
    return json_response(await cancel_on_disconnect(request, answer.collect()))


async def encode(request: Request) -> Response:
    body = await read_body(request, EncodeBody)
    given: Any = body.text if body.text is not None else body.input_ids
    is_one = isinstance(given, str) or bool(given) and isinstance(given[0], int)
    vectors, num_tokens, _ = await embed(request, body, [given] if is_one else given)
    meta: dict[str, Any] = {"id": body.request_id or new_id("")}
    if is_one:
        return json_response({"embedding": vectors[0], "meta_info": {**meta, "prompt_tokens": num_tokens}})
    return json_response([{"embedding": one, "meta_info": meta} for one in vectors])


async def show_model(request: Request) -> Response:
    """Describe the first model in SGLang's names."""
    model = await server_of(request).catalog.open(None)
    source = status.find_source(model, request)
    return json_response(
        {
            "model_path": source,
            "tokenizer_path": source,
            "served_model_name": model.name,
            "is_generation": not model.facts.is_encoder,
            "preferred_sampling_params": None,
            "weight_version": model.fingerprint,
            "reasoning_parser": model.reasoning_parser,
            "tool_call_parser": model.tool_call_parser,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "architectures": [model.facts.architecture],
            "max_model_len": model.facts.max_model_len,
        }
    )


async def show_server(request: Request) -> Response:
    """List the first model's settings, and the engine's figures; tenants see neither."""
    model = await server_of(request).catalog.open(None)
    found: dict[str, Any] = {"version": VERSION, "served_model_name": model.name}
    if sees_all(request):
        found |= {name: value for name, value, _ in model.facts.settings}
        found |= {"model_path": str(model.path), "internal_states": [model.running.stats]}
        found["max_total_num_tokens"] = model.facts.kv_cache_tokens
    return json_response(found)


TAG = "SGLang"
READS: list[tuple[str, Handler, str]] = [
    ("/health_generate", status.health, "health"),
    ("/get_model_info", show_model, TAG),
    ("/model_info", show_model, TAG),
    ("/get_server_info", show_server, TAG),
    ("/server_info", show_server, TAG),
]
WRITES: list[tuple[str, Handler, type[BaseModel] | None, str]] = [
    ("/generate", generate, GenerateBody, TAG),
    ("/encode", encode, EncodeBody, TAG),
    ("/flush_cache", status.reset_prefix_cache, None, TAG),
]
