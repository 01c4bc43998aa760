"""What the server says of itself: health, version, models, figures."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from penstock.hub.names import looks_like_path
from penstock.server.context import json_response, server_of
from penstock.server.errors import ApiError
from penstock.server.gate import sees_all
from penstock.server.model import ServedModel
from penstock.version import VERSION


async def live(request: Request) -> Response:
    """The process answers."""
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """The model is loaded, its engine gives signs of life, and requests are taken."""
    server = server_of(request)
    if server.ready:
        return json_response({"status": "ready"})
    reason, retry_s = ("stopping", 1) if server.draining else server.catalog.waits_for
    return json_response({"status": reason}, 503, {"Retry-After": str(retry_s)})


async def version(request: Request) -> Response:
    return json_response({"version": VERSION})


async def models(request: Request) -> Response:
    catalog = server_of(request).catalog
    cards = [_card(model, name, request) for model in catalog for name in catalog.names_of(model)]
    return json_response({"object": "list", "data": cards})


async def model(request: Request) -> Response:
    if not request.path_params["name"]:  # /v1/models/
        return await models(request)
    catalog, name = server_of(request).catalog, request.path_params["name"]
    found = catalog.find(name)
    return json_response(_card(found, name if name in catalog.names_of(found) else found.name, request))


def source_of(model: ServedModel, request: Request) -> str:
    """The source of a model; a path only for those who may see it."""
    return model.model if sees_all(request) or not looks_like_path(model.model) else model.name


def _card(model: ServedModel, name: str, request: Request) -> dict[str, Any]:
    card: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "penstock",
        "root": source_of(model, request),
        "parent": None,
        "loaded": model.loaded,
    }
    if model.loaded:
        card["max_model_len"] = model.facts.max_model_len
        card["kind"] = "embedding" if model.facts.is_encoder else "chat" if _chats(model) else "completion"
    return card


def _chats(model: ServedModel) -> bool:
    return model.tokenizer is not None and model.tokenizer.chat_template is not None


async def info(request: Request) -> Response:
    """Every setting of every model, and why it is so. Tenants are told which models there are."""
    server = server_of(request)
    if not sees_all(request):
        told = [
            {"name": one.name, "loaded": one.loaded, **(_public_facts(one) if one.loaded else {})}
            for one in server.catalog
        ]
        return json_response({"version": VERSION, "models": told})
    shown = []
    for one in server.catalog:
        entry: dict[str, Any] = {"name": one.name, "model": one.model, "loaded": one.loaded}
        if one.loaded:
            facts = one.facts
            entry |= {
                **_public_facts(one),
                "path": str(one.path),
                "num_bytes": facts.num_bytes,
                "kv_cache_bytes": facts.kv_cache_bytes,
                "load_s": facts.load_s,
                "pid": one.running.pid,
                "num_restarts": one.running.num_restarts,
                "stats": one.running.stats,
                "settings": [{"name": name, "value": value, "why": why} for name, value, why in facts.settings],
                "defaults": [
                    {"name": each.name, "value": each.value, "why": each.why} for each in one.found_defaults.settings
                ],
            }
        shown.append(entry)
    return json_response({"version": VERSION, "uptime_s": time.time() - server.begun_s, "models": shown})


def _public_facts(model: ServedModel) -> dict[str, Any]:
    facts = model.facts
    return {
        "architecture": facts.architecture,
        "quantization": facts.quantization,
        "max_model_len": facts.max_model_len,
    }


async def running(request: Request) -> Response:
    """What runs and waits now, without a word of its content."""
    server = server_of(request)
    rows = []
    for one in server.catalog:
        if one.engine is None:
            continue
        for state, flights in (("running", one.engine.flights.values()), ("waiting", one.admission)):
            for flight in flights:
                rows.append(
                    {
                        "id": flight.request.id,
                        "model": one.name,
                        "state": state,
                        "tenant": flight.tenant,
                        "age_s": round(time.monotonic() - flight.begun_s, 3),
                        "num_prompt_tokens": len(flight.request.tokens),
                        "num_output_tokens": sum(len(tokens) for tokens in flight.outputs.values()),
                        "max_tokens": flight.request.max_tokens,
                        "num_siblings": flight.request.num_siblings,
                    }
                )
    return json_response({"pid": server.pid, "uptime_s": time.time() - server.begun_s, "requests": rows})


async def reset_prefix_cache(request: Request) -> Response:
    for one in server_of(request).catalog:
        if one.engine is not None:
            one.engine.forget_prefixes()
    return json_response({"status": "ok"})


async def metrics(request: Request) -> Response:
    return Response(server_of(request).metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def not_found(request: Request, error: Exception) -> Response:
    path = request.url.path
    meant = [other for other in (f"/v1{path}", path.removeprefix("/v1")) if other != path and _is_route(request, other)]
    advice = f"did you mean {meant[0][:200]}?" if meant else "see /docs for those there are"
    return ApiError(404, f"there is no route {request.method} {path[:200]}: {advice}", code="not_found").response(path)


def _is_route(request: Request, path: str) -> bool:
    scope = {**request.scope, "path": path}
    return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)


async def wrong_method(request: Request, error: Exception) -> Response:
    return ApiError(
        405, f"{request.url.path[:200]} does not take {request.method}", code="method_not_allowed"
    ).response(request.url.path)
