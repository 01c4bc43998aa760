"""/api/tags, /api/ps, /api/show and /api/version: which models there are and what they are."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import PenstockError
from penstock.hub import SHORT_NAMES, list_models
from penstock.hub.names import existing_path
from penstock.server.about import source_of
from penstock.server.context import json_response, read, server_of
from penstock.server.model import ServedModel
from penstock.server.ollama.answer import timestamp
from penstock.server.ollama.bodies import OllamaShow
from penstock.server.ollama.names import find_model
from penstock.server.ollama.options import own_defaults
from penstock.text.reasoning import detect_kind
from penstock.text.tools.describe import supports_tools
from penstock.version import VERSION

FOREVER = "9999-12-31T23:59:59Z"


async def alive(request: Request) -> Response:
    """What Ollama's clients ask first."""
    return Response("Penstock is running", media_type="text/plain")


async def version(request: Request) -> Response:
    return json_response({"version": VERSION})


async def tags(request: Request) -> Response:
    """The models that are served, loaded or not."""
    catalog = list(server_of(request).catalog)
    files = await asyncio.to_thread(lambda: [_files(model) for model in catalog])
    return json_response({"models": [_entry(model, *found) for model, found in zip(catalog, files)]})


async def ps(request: Request) -> Response:
    """The models that are loaded."""
    entries = []
    for model in server_of(request).catalog:
        if model.loaded:
            left_s = max(0.0, model.keep_alive_s - model.idle_s)
            size = model.facts.gpu_bytes or model.facts.num_bytes + model.facts.kv_cache_bytes
            entries.append(
                {
                    **_entry(model, size, time.time()),
                    "size_vram": model.facts.gpu_bytes,
                    "context_length": model.facts.max_model_len,
                    "expires_at": FOREVER if math.isinf(left_s) else timestamp(time.time() + left_s),
                }
            )
            del entries[-1]["modified_at"]
    return json_response({"models": entries})


async def show(request: Request) -> Response:
    """What is known without loading the model: all of it once it has been loaded."""
    body = await read(request, OllamaShow)
    model = find_model(server_of(request).catalog, body.model, body.name)
    _, modified_s = await asyncio.to_thread(_files, model)
    template = (model.tokenizer.chat_template if model.tokenizer else None) or ""
    return json_response(
        {
            "modelfile": f"FROM {source_of(model, request)}\n",
            "parameters": _parameters(model),
            "template": template,
            "license": "",
            "details": _details(model),
            "model_info": _info(model),
            "capabilities": _capabilities(model, template),
            "modified_at": timestamp(modified_s),
        }
    )


def _entry(model: ServedModel, num_bytes: int, modified_s: float) -> dict[str, Any]:
    told = f"{model.name}:{model.model}"  # names the model; its files are not read for this
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": timestamp(modified_s),
        "size": num_bytes,
        "digest": hashlib.sha256(told.encode()).hexdigest(),
        "details": _details(model),
    }


def _details(model: ServedModel) -> dict[str, Any]:
    facts = model.facts if model.loaded else None
    family = _family(model)
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


def _family(model: ServedModel) -> str:
    """llama for LlamaForCausalLM."""
    return model.facts.architecture.partition("For")[0].lower() if model.loaded else ""


def _info(model: ServedModel) -> dict[str, Any]:
    if not model.loaded:
        return {}
    facts, family = model.facts, _family(model)
    return {
        "general.architecture": family,
        f"{family}.context_length": facts.max_model_len,
        f"{family}.embedding_length": facts.hidden_size,
        f"{family}.vocab_size": facts.vocab_size,
    }


def _parameters(model: ServedModel) -> str:
    """The model's own sampling values, as a Modelfile writes them."""
    own = own_defaults(model)
    values = {
        "temperature": own.temperature,
        "top_k": own.top_k,
        "top_p": own.top_p,
        "min_p": own.min_p,
        "repeat_penalty": own.repetition_penalty,
    }
    return "\n".join(f"{name:<30} {value}" for name, value in values.items()) if model.loaded else ""


def _capabilities(model: ServedModel, template: str) -> list[str]:
    if model.loaded and model.facts.is_encoder:
        return ["embedding"]
    thinks = detect_kind(template) is not None
    inserts = model.tokenizer is not None and model.tokenizer.infill is not None
    return [
        "completion",
        *(["tools"] if supports_tools(template) else []),
        *(["insert"] if inserts else []),
        *(["thinking"] if thinks else []),
    ]


def _files(model: ServedModel) -> tuple[int, float]:
    """Size and age of a model's files; of one that has yet to be fetched, nothing and now."""
    try:
        path = model.path or existing_path(model.model)
        if path is not None:
            return _size(path), path.stat().st_mtime
        names = (model.model, SHORT_NAMES.get(model.model))
        stored = next((one for one in list_models() if one.name in names or one.source in names), None)
    except (OSError, PenstockError):
        stored = None
    return (stored.num_bytes, stored.modified_s) if stored else (0, float(model.created))


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in files)
