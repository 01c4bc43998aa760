"""Tokens and their ids, as a model folder or a GGUF file lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.errors import InvalidModel
from penstock.models.files.gguf_checkpoint import GgufCheckpoint
from penstock.models.files.json_file import read_object

FILE = "tokenizer.json"
MAX_BYTES = 1 << 28


def read_vocabulary(path: Path) -> dict[str, int]:
    """Return the id of each token as the file spells it, without running a tokenizer."""
    if path.is_file():
        checkpoint = GgufCheckpoint(path)
        try:
            tokens = checkpoint.metadata.get("tokenizer.ggml.tokens")
        finally:
            checkpoint.close()
        return _check(path, [(token, id) for id, token in enumerate(tokens if isinstance(tokens, list) else ())])
    file = path / FILE
    if not file.is_file():
        raise InvalidModel(f"{path} has no {FILE}, so that its tokens cannot be compared: give a model that has one")
    described = read_object(file, MAX_BYTES)
    model = described.get("model")
    listed: Any = model.get("vocab") if isinstance(model, dict) else None
    found: list[tuple[Any, Any]] = list(listed.items()) if isinstance(listed, dict) else []
    if isinstance(listed, list):  # Unigram: tokens with their scores
        found = [(entry[0], id) for id, entry in enumerate(listed) if isinstance(entry, list) and entry]
    added = described.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            found.append((token.get("content"), token.get("id")))
    return _check(file, found)


def _check(path: Path, tokens: list[tuple[Any, Any]]) -> dict[str, int]:
    if not tokens or not all(isinstance(token, str) and type(id) is int and id >= 0 for token, id in tokens):
        raise InvalidModel(f"{path} lists no tokens with their ids: fetch it again")
    return dict(tokens)
