"""llama-server's routes: its own, and its other names of OpenAI's."""

from __future__ import annotations

from pydantic import BaseModel

from penstock.server import status
from penstock.server.http.context import Handler
from penstock.server.llama.about import apply_template, count_input_tokens, show_properties
from penstock.server.llama.completion import NativeCompletionBody, complete
from penstock.server.llama.embeddings import NativeEmbeddingBody, embed_natively
from penstock.server.llama.infill import InfillBody, infill
from penstock.server.openai.chat import chat_completions
from penstock.server.openai.chat_body import ChatBody
from penstock.server.openai.embeddings import RerankBody, rerank
from penstock.server.responses.body import ResponsesBody
from penstock.server.responses.routes import responses

TAG = "llama-server"
READS: list[tuple[str, Handler, str]] = [
    ("/v1/health", status.health, "health"),
    ("/models", status.models, TAG),
    ("/props", show_properties, TAG),
]
WRITES: list[tuple[str, Handler, type[BaseModel] | None, str]] = [
    ("/completion", complete, NativeCompletionBody, TAG),
    ("/completions", complete, NativeCompletionBody, TAG),
    ("/infill", infill, InfillBody, TAG),
    ("/apply-template", apply_template, ChatBody, TAG),
    ("/embedding", embed_natively, NativeEmbeddingBody, TAG),
    ("/embeddings", embed_natively, NativeEmbeddingBody, TAG),
    ("/chat/completions", chat_completions, ChatBody, TAG),
    ("/chat/completions/input_tokens", count_input_tokens, ChatBody, TAG),
    ("/v1/chat/completions/input_tokens", count_input_tokens, ChatBody, TAG),
    ("/responses", responses, ResponsesBody, TAG),
    ("/reranking", rerank, RerankBody, TAG),
    ("/v1/reranking", rerank, RerankBody, TAG),
]
