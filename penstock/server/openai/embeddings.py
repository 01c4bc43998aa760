"""POST /v1/embeddings, and /score and /rerank by cosine similarity."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.common.fields import MAX_INT32, SamplingBody, hide_fields
from penstock.server.common.prompts import Pieces, PromptList, encode_prompts, list_prompts
from penstock.server.http.context import (
    cancel_on_disconnect,
    client_of,
    json_response,
    new_id,
    now,
    read_body,
    server_of,
    start_generation,
)
from penstock.types import SamplingParams
from penstock.types.output import cosine

MAX_INPUTS = 2048

Kind = TypeVar("Kind")
Several = Annotated[list[Kind], Field(max_length=MAX_INPUTS)]

USED = frozenset({"model", "user", "priority", "timeout", "truncate_prompt_tokens", "request_id", "rid"})
UNUSED = sorted(SamplingBody.model_fields.keys() - USED)


class PoolBody(SamplingBody):
    """Base of embedding bodies; sampling fields are refused by name."""

    model_config = ConfigDict(json_schema_extra=lambda schema: hide_fields(schema, UNUSED))


class EmbeddingBody(PoolBody):
    input: str | list[int] | Several[str] | Several[list[int]] | PromptList
    dimensions: int | None = Field(None, ge=1, le=MAX_INT32)
    encoding_format: Literal["float", "base64"] = "float"


class ScoreBody(PoolBody):
    text_1: str | Several[str]
    text_2: str | Several[str]


class RerankBody(PoolBody):
    query: str = Field(min_length=1)
    documents: list[str | dict[str, str]] | None = Field(None, min_length=1, max_length=MAX_INPUTS)
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = True
    # as in text-embeddings-inference, whose answer is a list
    texts: list[str] | None = Field(None, min_length=1, max_length=MAX_INPUTS)
    return_text: bool = False

    @model_validator(mode="after")
    def _check_fields(self) -> RerankBody:
        if (self.documents is None) == (self.texts is None):
            raise ValueError("give documents, or texts as in text-embeddings-inference")
        return self

    def list_texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.get("text", "") for one in self.documents or self.texts or ()]


async def embeddings(request: Request) -> Response:
    body = await read_body(request, EmbeddingBody)
    inputs = list_prompts(body.input)
    vectors, num_tokens, name = await embed(request, body, inputs)
    if body.dimensions is not None and vectors and body.dimensions > len(vectors[0]):
        raise InvalidRequest(f"dimensions={body.dimensions} is more than the model's {len(vectors[0])}")
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _encode(_shorten(vector, body.dimensions), body.encoding_format),
        }
        for index, vector in enumerate(vectors)
    ]
    return json_response(
        {
            "object": "list",
            "data": data,
            "model": body.model or name,
            "id": new_id("embd-"),
            "created": now(),
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


async def score(request: Request) -> Response:
    body = await read_body(request, ScoreBody)
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if not first or len(first) not in (1, len(second)):
        raise InvalidRequest(f"text_1 has {len(first)} texts and text_2 {len(second)}: give one, or as many as text_2")
    vectors, num_tokens, name = await embed(request, body, [*first, *second])
    ones, twos = vectors[: len(first)], vectors[len(first) :]
    data = [
        {"index": index, "object": "score", "score": cosine(ones[index % len(ones)], two)}
        for index, two in enumerate(twos)
    ]
    return json_response(
        {
            "id": new_id("score-"),
            "object": "list",
            "created": now(),
            "model": body.model or name,
            "data": data,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


async def rerank(request: Request) -> Response:
    body = await read_body(request, RerankBody)
    texts = body.list_texts()
    vectors, num_tokens, name = await embed(request, body, [body.query, *texts])
    scores = [cosine(vectors[0], vector) for vector in vectors[1:]]
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
    if body.texts is not None:
        return json_response(
            [
                {"index": index, "score": scores[index], **({"text": texts[index]} if body.return_text else {})}
                for index in order
            ]
        )
    results = [
        {
            "index": index,
            "relevance_score": scores[index],
            **({"document": {"text": texts[index]}} if body.return_documents else {}),
        }
        for index in order
    ]
    return json_response(
        {
            "id": new_id("rerank-"),
            "model": body.model or name,
            "results": results,
            "usage": {"total_tokens": num_tokens, "prompt_tokens": num_tokens},
        }
    )


async def embed(request: Request, body: PoolBody, inputs: Sequence[Pieces]) -> tuple[list[list[float]], int, str]:
    """Compute the inputs' vectors; return them, the number of tokens and the model's name."""
    unused = next((name for name in UNUSED if name in body.model_fields_set), None)
    if unused is not None:
        raise InvalidRequest(f"{unused} has no effect on embeddings: leave it out")
    server = server_of(request)
    model = await server.catalog.open(body.model)
    length = body.truncate_prompt_tokens
    tenant = client_of(request).tenant
    work = encode_prompts(model.text, inputs, cut=length is not None, tenant=tenant)
    encoded = await cancel_on_disconnect(request, work)
    if length is not None:
        encoded = [await model.text.keep_beginning(one, length, tenant) for one in encoded]
    params = SamplingParams(max_tokens=1)
    generation = await start_generation(request, model, body, [(one, params) for one in encoded], pool=True)
    await cancel_on_disconnect(request, generation.wait())
    vectors = [list(flight.collector.embedding or ()) for flight in generation.flights]
    return vectors, generation.usage.num_prompt, model.name


def _shorten(vector: list[float], length: int | None) -> list[float]:
    """Keep the first dimensions and renormalize, as OpenAI does."""
    if length is None or length >= len(vector):
        return vector
    return normalize(vector[:length])


def normalize(vector: list[float]) -> list[float]:
    norm = math.sqrt(math.fsum(value * value for value in vector)) or 1.0
    return [value / norm for value in vector]


def _encode(vector: list[float], form: str) -> Any:
    if form == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
