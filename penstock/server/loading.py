"""`/admin/models`: which models are loaded or known and what memory they take; load and unload them."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import PenstockError, quote
from penstock.host.machine import free_memory_bytes, resident_bytes
from penstock.hub import SHORT_NAMES, StoredModel, list_models
from penstock.server.catalog import Catalog
from penstock.server.common.fields import RequestBody
from penstock.server.http.context import cancel_on_disconnect, json_response, read_body, server_of
from penstock.server.http.errors import ApiError
from penstock.server.model import ServedModel
from penstock.server.observe.snapshot import describe_processes

MAX_NAME_CHARS = 1_000
MAX_STORED = 500  # models on disk, as listed


class ModelBody(RequestBody):
    """Name a model to load or to unload."""

    model: str = Field(min_length=1)


async def list_all(request: Request) -> Response:
    """List the server's models with their memory, and those on disk that it does not serve."""
    catalog = server_of(request).catalog
    known = list(catalog)
    sizes, stored = await asyncio.to_thread(lambda: ([_file_bytes(model) for model in known], _list_stored()))
    served = {source for model in known for source in (model.name, model.model, SHORT_NAMES.get(model.model))}
    others = [one for one in stored if one.name not in served and (not one.source or one.source not in served)]
    return json_response(
        {
            "models": [_describe(catalog, model, size) for model, size in zip(known, sizes)],
            "stored": [
                {"name": one.name, "source": one.source, "file_bytes": one.num_bytes, "format": one.format}
                for one in others[:MAX_STORED]
            ],
            "can_add": catalog.can_add,
            "memory": {"budget_bytes": catalog.budget_bytes, "free_bytes": free_memory_bytes()},
        }
    )


async def load(request: Request) -> Response:
    """Load a model that is known or on disk, and wait until it is ready."""
    body = await read_body(request, ModelBody)
    catalog = server_of(request).catalog
    if all(body.model not in (*catalog.list_names(one), one.model) for one in catalog):
        stored = await asyncio.to_thread(_list_stored)
        if all(body.model != one.name for one in stored):
            raise ApiError(
                404,
                f"the model {quote(body.model[:MAX_NAME_CHARS])} is neither served nor on disk: pull it first",
                param="model",
                code="model_not_found",
            )
        catalog.add(body.model)
    model = catalog.find(body.model, is_exact=True)
    await cancel_on_disconnect(request, catalog.open(model.name))
    if not model.is_loaded:
        raise ApiError(409, f"{model.name} was unloaded while it was loaded: load it again", code="unloaded")
    return json_response(_describe(catalog, model, await asyncio.to_thread(_file_bytes, model)))


async def unload(request: Request) -> Response:
    """Unload a model that no request uses, or stop loading it; it is loaded again when a request needs it."""
    body = await read_body(request, ModelBody)
    catalog = server_of(request).catalog
    model = catalog.find(body.model, is_exact=True)
    if model.is_busy:
        raise ApiError(
            409, f"{model.name} has requests that run or wait: try again when they have ended", code="model_busy"
        )
    await model.close()
    return json_response(_describe(catalog, model, await asyncio.to_thread(_file_bytes, model)))


def _describe(catalog: Catalog, model: ServedModel, file_bytes: int | None) -> dict[str, Any]:
    engine = model.engine
    state = "unloaded" if engine is None else f"failed: {engine.failure}" if engine.failure else engine.state
    shown: dict[str, Any] = {
        "name": model.name,
        "names": catalog.list_names(model),
        "source": model.model,
        "state": state,
        "is_default": model is catalog.default,
        "is_loaded": model.is_loaded,
        "is_busy": model.is_busy,
        "file_bytes": file_bytes,
        "keep_alive_s": None if math.isinf(model.keep_alive_s) else model.keep_alive_s,
        "idle_s": round(model.idle_s, 1),
    }
    if engine is not None and model.is_loaded:
        facts = model.facts
        shown |= {
            "architecture": facts.architecture,
            "quantization": facts.quantization,
            "max_model_len": facts.max_model_len,
            "weights_bytes": facts.num_bytes,
            "cache_bytes": facts.kv_cache_bytes,
            "cache_tokens": facts.kv_cache_tokens,
            "gpu_bytes": facts.gpu_bytes,
            "resident_bytes": sum(resident_bytes(one.pid) for one in engine.engines if one.pid is not None) or None,
            "load_s": round(facts.load_s, 3),
            "restarts": engine.num_restarts,
            **describe_processes(engine),
        }
    return shown


def _file_bytes(model: ServedModel) -> int | None:
    """Return the size of a model's files, None if they are not here."""
    try:
        path = model.path or Path(model.model)
        if path.is_dir():
            return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        if path.is_file():
            return model.file_bytes
    except (OSError, PenstockError):
        return None
    names = (model.model, SHORT_NAMES.get(model.model))
    return next((one.num_bytes for one in _list_stored() if one.name in names or one.source in names), None)


def _list_stored() -> list[StoredModel]:
    try:
        return list_models()
    except (OSError, PenstockError):
        return []
