"""Resolve a model's name to files on disk.

In: a name as the user typed it. Out: the path of a folder or GGUF file, downloaded and verified if it was missing. The
hub never opens a checkpoint: `penstock.models` does.
"""

from __future__ import annotations

from penstock.hub.download_errors import Progress
from penstock.hub.names import DEFAULT_MODEL, SHORT_NAMES
from penstock.hub.resolve import list_models, pull, remove_model, resolve_model
from penstock.hub.store import StoredModel, home

__all__ = [
    "DEFAULT_MODEL",
    "SHORT_NAMES",
    "Progress",
    "StoredModel",
    "home",
    "list_models",
    "pull",
    "remove_model",
    "resolve_model",
]
