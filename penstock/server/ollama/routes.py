"""Ollama's routes."""

from __future__ import annotations

from pydantic import BaseModel

from penstock.server.http.context import Handler
from penstock.server.ollama import bodies, chat, models

TAG = "Ollama"

READS: list[tuple[str, Handler, str]] = [
    ("/api/tags", models.tags, TAG),
    ("/api/ps", models.ps, TAG),
    ("/api/version", models.version, TAG),
]
WRITES: list[tuple[str, Handler, type[BaseModel] | None, str]] = [
    ("/api/chat", chat.chat, bodies.OllamaChat, TAG),
    ("/api/generate", chat.generate, bodies.OllamaGenerate, TAG),
    ("/api/embed", chat.embed, bodies.OllamaEmbed, TAG),
    ("/api/embeddings", chat.embeddings, bodies.OllamaEmbeddings, TAG),
    ("/api/show", models.show, bodies.OllamaShow, TAG),
    ("/api/pull", models.pull, bodies.OllamaPull, TAG),
]
DELETES: list[tuple[str, Handler, type[BaseModel] | None, str]] = [
    ("/api/delete", models.delete, bodies.OllamaDelete, TAG)
]
