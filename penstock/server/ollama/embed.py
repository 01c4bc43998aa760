"""/api/embed and the older /api/embeddings."""

from __future__ import annotations

import math
import time

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.context import json_response, read, server_of
from penstock.server.embeddings import PoolBody
from penstock.server.embeddings import embed as vectors_of
from penstock.server.ollama.answer import Clock
from penstock.server.ollama.bodies import OllamaEmbed, OllamaEmbeddings
from penstock.server.ollama.names import find_model
from penstock.server.ollama.talk import load


async def embed(request: Request) -> Response:
    clock = Clock(time.monotonic())
    body = await read(request, OllamaEmbed)
    texts = [body.input] if isinstance(body.input, str) else body.input
    model = find_model(server_of(request).catalog, body.model, body.name)
    await load(request, body, model, clock)
    length = None if body.truncate is False else model.facts.max_model_len
    vectors: list[list[float]] = []
    num_tokens = 0
    if texts:
        vectors, num_tokens, _ = await vectors_of(request, _asked(model.name, length), list(texts))
    return json_response(
        {
            "model": body.model or model.name,
            "embeddings": [_unit(vector[: body.dimensions]) for vector in vectors],
            **clock.durations(),
            "prompt_eval_count": num_tokens,
        }
    )


async def embeddings(request: Request) -> Response:
    body = await read(request, OllamaEmbeddings)
    model = find_model(server_of(request).catalog, body.model, body.name)
    await load(request, body, model, Clock(time.monotonic()))
    vectors, _, _ = await vectors_of(request, _asked(model.name, model.facts.max_model_len), [body.prompt])
    return json_response({"embedding": vectors[0]})


def _asked(model: str, length: int | None) -> PoolBody:
    cut = {} if length is None else {"truncate_prompt_tokens": length}
    return PoolBody.model_validate({"model": model, **cut})


def _unit(vector: list[float]) -> list[float]:
    norm = math.sqrt(math.fsum(value * value for value in vector)) or 1.0
    return [value / norm for value in vector]
