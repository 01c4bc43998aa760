"""Ollama's routes about models: find, list, show, pull and delete them."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock import hub
from penstock.errors import DownloadFailed, InvalidModel, PenstockError, quote
from penstock.host.gguf_parts import model_files
from penstock.host.version import VERSION
from penstock.hub import SHORT_NAMES, list_models
from penstock.hub.names import existing_path, looks_like_path, parse_name
from penstock.server.catalog import Catalog
from penstock.server.http.context import event_stream, json_response, read_body, server_of
from penstock.server.http.errors import ApiError
from penstock.server.model import ServedModel
from penstock.server.ollama.answer import MEDIA_TYPE, encode_failure, encode_line, format_time
from penstock.server.ollama.bodies import OllamaDelete, OllamaPull, OllamaShow, make_defaults
from penstock.server.status import find_source
from penstock.text.chat.reasoning import detect_kind
from penstock.text.tools.describe import supports_tools

LATEST = ":latest"
MAX_NAME_CHARS = 1_000
HUBS = ("hf.co/", "huggingface.co/")
FOREVER = "9999-12-31T23:59:59Z"
PROGRESS_S = 0.5  # between progress lines


def normalize_name(name: str) -> str:
    """Remove the prefixes and the tag that Ollama adds to a name."""
    for prefix in HUBS:
        name = name.removeprefix(prefix)
    return name.removesuffix(LATEST)


def find_model(catalog: Catalog, model: str | None, older: str | None = None, *, is_exact: bool = False) -> ServedModel:
    """Find a model; NAME and NAME:latest are the same."""
    name = model or older
    known = {own for one in catalog for own in catalog.list_names(one)}
    known |= set() if is_exact else {name for one in catalog for name in one.loras.list_names()}
    for candidate in (name, name and normalize_name(name), f"{name}{LATEST}"):
        if candidate in known:
            return catalog.find(candidate)
    return catalog.find(normalize_name(name) if name else None, is_exact=is_exact)


def find_lora(catalog: Catalog, model: str | None, older: str | None = None) -> str | None:
    """Return the name of the adapter that a body names as its model; None if it names a model."""
    base, name = find_model(catalog, model, older), model or older
    candidates = (name, name and normalize_name(name), f"{name}{LATEST}")
    return next((one for one in candidates if one in base.loras), None)


def require_name(model: str | None, older: str | None) -> str:
    name = normalize_name(model or older or "")
    if not name:
        raise ApiError(400, "'model' is missing: give a model's name", param="model")
    if len(name) > MAX_NAME_CHARS:
        raise ApiError(
            404,
            f"the model {quote(name)} does not exist: a name has at most {MAX_NAME_CHARS} characters",
            param="model",
            code="model_not_found",
        )
    return name


async def alive(request: Request) -> Response:
    """Answer the probe of Ollama's clients."""
    return Response("Penstock is running", media_type="text/plain")


async def version(request: Request) -> Response:
    return json_response({"version": VERSION})


async def tags(request: Request) -> Response:
    """List the served models, loaded or not."""
    catalog = list(server_of(request).catalog)
    files = await asyncio.to_thread(lambda: [_stat_files(model) for model in catalog])
    return json_response({"models": [_format_model(model, *found) for model, found in zip(catalog, files)]})


async def ps(request: Request) -> Response:
    """List the loaded models."""
    entries = []
    for model in server_of(request).catalog:
        if model.is_loaded:
            left_s = max(0.0, model.keep_alive_s - model.idle_s)
            size = model.facts.gpu_bytes or model.facts.num_bytes + model.facts.kv_cache_bytes
            entries.append(
                {
                    **_format_model(model, size, time.time()),
                    "size_vram": model.facts.gpu_bytes,
                    "context_length": model.facts.max_model_len,
                    "expires_at": FOREVER if math.isinf(left_s) else format_time(time.time() + left_s),
                }
            )
            del entries[-1]["modified_at"]
    return json_response({"models": entries})


async def show(request: Request) -> Response:
    """Describe a model without loading it; some fields are known only once it is loaded."""
    body = await read_body(request, OllamaShow)
    model = find_model(server_of(request).catalog, body.model, body.name)
    _, modified_s = await asyncio.to_thread(_stat_files, model)
    template = (model.tokenizer.chat_template if model.tokenizer else None) or ""
    return json_response(
        {
            "modelfile": f"FROM {find_source(model, request)}\n",
            "parameters": _format_parameters(model),
            "template": template,
            "license": "",
            "details": _format_details(model),
            "model_info": _format_info(model),
            "capabilities": _list_capabilities(model, template),
            "modified_at": format_time(modified_s),
        }
    )


def _format_model(model: ServedModel, num_bytes: int, modified_s: float) -> dict[str, Any]:
    identity = f"{model.name}:{model.model}"  # identifies the model without reading its files
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": format_time(modified_s),
        "size": num_bytes,
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        "details": _format_details(model),
    }


def _format_details(model: ServedModel) -> dict[str, Any]:
    facts = model.facts if model.is_loaded else None
    family = _find_family(model)
    suffix = (model.path.suffix if model.path else "").lower()
    form = "" if model.path is None else "gguf" if suffix == ".gguf" else "safetensors"
    return {
        "parent_model": "",
        "format": form,
        "family": family,
        "families": [family] if family else None,
        "parameter_size": "",
        "quantization_level": facts.quantization if facts else "",
    }


def _find_family(model: ServedModel) -> str:
    """Return llama for LlamaForCausalLM."""
    return model.facts.architecture.partition("For")[0].lower() if model.is_loaded else ""


def _format_info(model: ServedModel) -> dict[str, Any]:
    if not model.is_loaded:
        return {}
    facts, family = model.facts, _find_family(model)
    return {
        "general.architecture": family,
        f"{family}.context_length": facts.max_model_len,
        f"{family}.embedding_length": facts.hidden_size,
        f"{family}.vocab_size": facts.vocab_size,
    }


def _format_parameters(model: ServedModel) -> str:
    """Format the model's default sampling parameters as a Modelfile does."""
    defaults = make_defaults(model)
    values = {
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
        "repeat_penalty": defaults.repetition_penalty,
    }
    return "\n".join(f"{name:<30} {value}" for name, value in values.items()) if model.is_loaded else ""


def _list_capabilities(model: ServedModel, template: str) -> list[str]:
    if model.is_loaded and model.facts.is_encoder:
        return ["embedding"]
    thinks = detect_kind(template) is not None
    inserts = model.tokenizer is not None and model.tokenizer.infill is not None
    return [
        "completion",
        *(["tools"] if supports_tools(template) else []),
        *(["insert"] if inserts else []),
        *(["thinking"] if thinks else []),
    ]


def _stat_files(model: ServedModel) -> tuple[int, float]:
    """Return size and modification time of a model's files; (0, now) if not downloaded."""
    try:
        path = model.path or existing_path(model.model)
        if path is not None:
            return _count_bytes(path), path.stat().st_mtime
        names = (model.model, SHORT_NAMES.get(model.model))
        stored = next((one for one in list_models() if one.name in names or one.source in names), None)
    except (OSError, PenstockError):
        stored = None
    return (stored.num_bytes, stored.modified_s) if stored else (0, float(model.created))


def _count_bytes(path: Path) -> int:
    files = model_files(path) if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in files)


async def pull(request: Request) -> Response:
    """Download a model and serve it under its name."""
    body = await read_body(request, OllamaPull)
    name = require_name(body.model, body.name)
    if looks_like_path(name) or existing_path(name) is not None:
        raise ApiError(400, f"{quote(name)} is a path: models are downloaded by name; serve files with --model")
    try:
        parse_name(name)
    except InvalidModel as error:
        raise ApiError(404, str(error), param="model") from None
    lines = _fetch(name, server_of(request).catalog)
    if body.stream is not False:
        return await event_stream(request, lines, encode_failure, MEDIA_TYPE)
    async for _ in lines:
        pass
    return json_response({"status": "success"})


async def _fetch(name: str, catalog: Catalog) -> AsyncGenerator[bytes, None]:
    """Download; a client that disconnects does not stop it."""
    yield encode_line({"status": "pulling manifest"})
    told: dict[str, tuple[int, int | None]] = {}  # bytes so far, and in all, by file

    def tell(label: str, num_bytes: int, total: int | None) -> None:
        told[label] = num_bytes, total

    fetching = asyncio.ensure_future(asyncio.to_thread(hub.pull, name, None, tell))
    try:
        while not (await asyncio.wait([fetching], timeout=PROGRESS_S))[0]:
            yield encode_line({"status": f"pulling {name}"} if not told else _format_progress(*list(told.items())[-1]))
        fetching.result()
    except (InvalidModel, DownloadFailed) as error:
        raise ApiError(404 if isinstance(error, InvalidModel) else 502, str(error)) from None
    catalog.add(name)
    yield encode_line({"status": "verifying sha256 digest"})
    yield encode_line({"status": "success"})


def _format_progress(label: str, progress: tuple[int, int | None]) -> dict[str, Any]:
    num_bytes, total = progress
    digest = "sha256:" + hashlib.sha256(label.encode()).hexdigest()  # clients tell files apart by it
    return {"status": f"pulling {label}", "digest": digest, "completed": num_bytes} | (
        {"total": total} if total else {}
    )


async def delete(request: Request) -> Response:
    """Unload a model and delete its files."""
    body = await read_body(request, OllamaDelete)
    name = require_name(body.model, body.name)
    catalog = server_of(request).catalog
    model = find_model(catalog, name, is_exact=True)
    catalog.check_removable(model)
    if not server_of(request).config.allow_delete:
        raise ApiError(403, "deleting models is not allowed: start the server with --allow-delete", code="no_delete")
    try:
        await asyncio.to_thread(hub.remove_model, model.model)
    except InvalidModel as error:
        raise ApiError(404, str(error)) from None
    await catalog.remove(model)
    return Response()
