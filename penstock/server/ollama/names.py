"""A model by the name that an Ollama client uses."""

from __future__ import annotations

from penstock.errors import shown
from penstock.server.catalog import Catalog
from penstock.server.errors import ApiError
from penstock.server.model import ServedModel

LATEST = ":latest"
MAX_NAME_CHARS = 1_000
HUBS = ("hf.co/", "huggingface.co/")


def plain_name(name: str) -> str:
    """Without what Ollama adds to a name."""
    for hub in HUBS:
        name = name.removeprefix(hub)
    return name.removesuffix(LATEST)


def find_model(catalog: Catalog, model: str | None, older: str | None = None, *, is_exact: bool = False) -> ServedModel:
    """NAME and NAME:latest are one model."""
    name = model or older
    known = {own for one in catalog for own in catalog.names_of(one)}
    for spelt in (name, name and plain_name(name), f"{name}{LATEST}"):
        if spelt in known:
            return catalog.find(spelt)
    return catalog.find(plain_name(name) if name else None, is_exact=is_exact)


def needed_name(model: str | None, older: str | None) -> str:
    name = plain_name(model or older or "")
    if not name:
        raise ApiError(400, "the body names no model: give 'model'", param="model")
    if len(name) > MAX_NAME_CHARS:
        raise ApiError(
            404,
            f"the model {shown(name)} does not exist: a name has at most {MAX_NAME_CHARS} characters",
            param="model",
            code="model_not_found",
        )
    return name
