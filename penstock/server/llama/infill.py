"""POST /infill, as in llama-server."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.common.fields import RequestBody
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
from penstock.server.openai.infill import encode_infill, find_infill_tokens, make_infill_room, stop_at_infill_end
from penstock.text.infill import Gap

MAX_CONTEXT_TOKENS = 2048  # of the text around the gap, if it is cut
MAX_FILES = 1024
MAX_NAME_CHARS = 4096


class InfillFile(RequestBody):
    """Another file, placed before the text."""

    ALLOWS_UNKNOWN: ClassVar[bool] = True  # editors send timestamps and more
    text: str
    filename: str = Field("tmp", max_length=MAX_NAME_CHARS)


class InfillBody(NativeBody):
    """Fields of /infill; `prompt` is what was typed after the prefix."""

    input_prefix: str
    input_suffix: str
    input_extra: list[InfillFile] = Field([], max_length=MAX_FILES)
    prompt: str = ""

    @field_validator("n")
    @classmethod
    def _check_n(cls, n: int | None) -> int | None:
        if n not in (None, 1):
            raise ValueError(f"n={n} is not supported here: ask {n} times, or /v1/completions with a suffix")
        return n

    @property
    def gap(self) -> Gap:
        return Gap(
            self.input_prefix + self.prompt,
            self.input_suffix,
            tuple((file.filename, file.text) for file in self.input_extra),
        )


async def infill(request: Request) -> Response:
    body = await read_body(request, InfillBody)
    model, tenant = await server_of(request).catalog.open(body.model), client_of(request).tenant
    marks = find_infill_tokens(model, "input_suffix")
    room = make_infill_room(model, body.max_output, MAX_CONTEXT_TOKENS)
    prompt = await cancel_on_disconnect(request, encode_infill(model, body.gap, room, tenant=tenant))
    params = stop_at_infill_end(await make_native_params(body, model, tenant), marks)
    answer = NativeAnswer(body, await start_generation(request, model, body, [(prompt, params)]))
    if body.stream:
        return await event_stream(request, answer.events(), encode_failure)
    return json_response(await cancel_on_disconnect(request, answer.collect()))
