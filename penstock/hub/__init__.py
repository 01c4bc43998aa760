"""From a model's name to files on disk.

In: a name as the user typed it. Out: the path of a folder or a GGUF file, fetched and verified when it was missing.
The hub never opens a checkpoint: what the files mean is for `penstock.models`.
"""

from __future__ import annotations

from penstock.hub.names import DEFAULT_MODEL, SHORT_NAMES
from penstock.hub.resolve import list_models, pull, remove_model, resolve_model
from penstock.hub.store import StoredModel, home

__all__ = [
    "DEFAULT_MODEL",
    "SHORT_NAMES",
    "StoredModel",
    "home",
    "list_models",
    "pull",
    "remove_model",
    "resolve_model",
]
