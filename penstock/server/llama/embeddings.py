"""POST /embedding and /embeddings: vectors as llama-server's own routes return them."""

from __future__ import annotations

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.common.prompts import AnyPrompt, Pieces, list_prompts
from penstock.server.http.context import json_response, read_body
from penstock.server.openai.embeddings import PoolBody, embed

EUCLIDEAN = 2
MAX_INT16 = 32760  # the largest entry of a vector normalized by its maximum


class NativeEmbeddingBody(PoolBody):
    """Fields of /embedding; `content` is an older name of `input`."""

    input: AnyPrompt | None = None
    content: AnyPrompt | None = None
    embd_normalize: int = Field(EUCLIDEAN, ge=-1, le=64)

    @model_validator(mode="after")
    def _check_fields(self) -> NativeEmbeddingBody:
        if (self.input is None) == (self.content is None):
            raise ValueError("give either input or content")
        if self.embd_normalize < 0:
            raise ValueError("embd_normalize=-1 is not supported: vectors have length 1; give 2, or leave it out")
        self.list_inputs()
        return self

    def list_inputs(self) -> list[Pieces]:
        given = self.content if self.input is None else self.input
        return [] if given is None else list_prompts(given)


async def embed_natively(request: Request) -> Response:
    body = await read_body(request, NativeEmbeddingBody)
    vectors, _, _ = await embed(request, body, body.list_inputs())
    return json_response(
        [
            {"index": index, "embedding": [normalize_by(vector, body.embd_normalize)]}
            for index, vector in enumerate(vectors)
        ]
    )


def normalize_by(vector: list[float], norm: int) -> list[float]:
    """Scale a vector to the p-norm `norm`; 0 is the largest entry, as a 16-bit integer."""
    if norm == EUCLIDEAN:
        return vector
    if norm == 0:
        factor = MAX_INT16 / (max(map(abs, vector), default=0.0) or 1.0)
    else:
        factor = 1.0 / (sum(abs(value) ** norm for value in vector) ** (1.0 / norm) or 1.0)
    return [value * factor for value in vector]
