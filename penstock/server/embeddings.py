"""/v1/embeddings, and /score and /rerank by the similarity of embeddings."""

from __future__ import annotations

import base64
import contextlib
import math
import struct
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.context import begin, client_of, json_response, new_id, now, read, server_of, unless_gone
from penstock.server.fields import WHOLE, SamplingBody, undocumented
from penstock.server.generation import Generation
from penstock.similarity import cosine
from penstock.types import SamplingParams

MOST_INPUTS = 2048

Kind = TypeVar("Kind")
Several = Annotated[list[Kind], Field(max_length=MOST_INPUTS)]

USED = frozenset({"model", "user", "priority", "timeout", "truncate_prompt_tokens", "request_id"})
UNUSED = sorted(SamplingBody.model_fields.keys() - USED)


class PoolBody(SamplingBody):
    """What all routes on embeddings take; sampling values have no meaning there and are refused by name."""

    model_config = ConfigDict(json_schema_extra=lambda schema: undocumented(schema, UNUSED))


class EmbeddingBody(PoolBody):
    input: str | list[int] | Several[str] | Several[list[int]]
    dimensions: int | None = Field(None, ge=1, le=WHOLE)
    encoding_format: Literal["float", "base64"] = "float"


class ScoreBody(PoolBody):
    text_1: str | Several[str]
    text_2: str | Several[str]


class RerankBody(PoolBody):
    query: str = Field(min_length=1)
    documents: list[str | dict[str, str]] = Field(min_length=1, max_length=MOST_INPUTS)
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = True


async def embeddings(request: Request) -> Response:
    body = await read(request, EmbeddingBody)
    inputs = _inputs(body.input)
    vectors, num_tokens, name = await embed(request, body, inputs)
    if body.dimensions is not None and vectors and body.dimensions > len(vectors[0]):
        raise InvalidRequest(f"dimensions={body.dimensions} is more than the model's {len(vectors[0])}")
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _shown(_shortened(vector, body.dimensions), body.encoding_format),
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
    body = await read(request, ScoreBody)
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
    body = await read(request, RerankBody)
    texts = [one if isinstance(one, str) else one.get("text", "") for one in body.documents]
    vectors, num_tokens, name = await embed(request, body, [body.query, *texts])
    scores = [cosine(vectors[0], vector) for vector in vectors[1:]]
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
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


async def embed(request: Request, body: PoolBody, inputs: list[str | list[int]]) -> tuple[list[list[float]], int, str]:
    """The inputs' vectors, how many tokens they had, and the model's name."""
    unused = next((name for name in UNUSED if name in body.model_fields_set), None)
    if unused is not None:
        raise InvalidRequest(f"{unused} has no meaning for embeddings: leave it out")
    server = server_of(request)
    model = await server.catalog.open(body.model)
    length = body.truncate_prompt_tokens
    tenant = client_of(request).tenant
    encoded = await unless_gone(request, model.encode_all(inputs, cut=length is not None, tenant=tenant))
    if length is not None:
        encoded = [await model.beginning(one, length, tenant) for one in encoded]
    params = SamplingParams(max_tokens=1)
    generation = await begin(request, model, body, [(one, params) for one in encoded], pool=True)
    await unless_gone(request, _wait(generation))
    vectors = [list(flight.collector.embedding or ()) for flight in generation.flights]
    return vectors, generation.usage.num_prompt, model.name


async def _wait(generation: Generation) -> None:
    async with contextlib.aclosing(generation.stream()) as items:
        async for _ in items:
            pass


def _inputs(given: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest("input is empty: give a text, a list of texts, or token ids")
    if isinstance(given[0], int):
        return [given]  # type: ignore[list-item]
    return list(given)  # type: ignore[arg-type]


def _shortened(vector: list[float], length: int | None) -> list[float]:
    """The first dimensions, made a unit vector again, as OpenAI's shortened embeddings."""
    if length is None or length >= len(vector):
        return vector
    part = vector[:length]
    norm = math.sqrt(math.fsum(value * value for value in part)) or 1.0
    return [value / norm for value in part]


def _shown(vector: list[float], form: str) -> Any:
    if form == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
