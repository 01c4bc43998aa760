"""Where Ollama's routes are."""

from __future__ import annotations

from pydantic import BaseModel

from penstock.server.context import Handler
from penstock.server.ollama import bodies, embed, models, store, talk

TAG = "Ollama"

READS: list[tuple[str, Handler, str]] = [
    ("/", models.alive, TAG),
    ("/api/tags", models.tags, TAG),
    ("/api/ps", models.ps, TAG),
    ("/api/version", models.version, TAG),
]
WRITES: list[tuple[str, Handler, type[BaseModel] | None, str]] = [
    ("/api/chat", talk.chat, bodies.OllamaChat, TAG),
    ("/api/generate", talk.generate, bodies.OllamaGenerate, TAG),
    ("/api/embed", embed.embed, bodies.OllamaEmbed, TAG),
    ("/api/embeddings", embed.embeddings, bodies.OllamaEmbeddings, TAG),
    ("/api/show", models.show, bodies.OllamaShow, TAG),
    ("/api/pull", store.pull, bodies.OllamaPull, TAG),
]
DELETES: list[tuple[str, Handler, type[BaseModel] | None, str]] = [
    ("/api/delete", store.delete, bodies.OllamaDelete, TAG)
]
