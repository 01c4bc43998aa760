"""Routes about the server: health, version, models, metrics."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from penstock.host.version import VERSION
from penstock.hub.names import looks_like_path
from penstock.server.catalog import Catalog
from penstock.server.config import BOTH
from penstock.server.engines.replica import MAX_AHEAD
from penstock.server.http.context import json_response, server_of
from penstock.server.http.errors import ApiError
from penstock.server.http.keys import sees_all
from penstock.server.http.relay import FACTS_HEADER, ServerFacts
from penstock.server.loras.registry import describe
from penstock.server.model import ServedModel
from penstock.server.observe.snapshot import describe_processes
from penstock.server.state import Server


async def live(request: Request) -> Response:
    """Report that the process answers."""
    return json_response({"status": "ok"})


async def health(request: Request) -> Response:
    """Like `ready`, in llama-server's words."""
    return json_response({"status": "ok"}) if server_of(request).is_ready else await ready(request)


async def ready(request: Request) -> Response:
    """Report if the model is loaded, its engine responds and requests are accepted."""
    server = server_of(request)
    if server.is_ready:
        role = {"role": server.config.lone_role} if server.config.lone_role else {}
        is_router = request.app.state.router_access.knows(request.scope)
        told = {FACTS_HEADER: msgspec.json.encode(describe_cache(server)).decode()} if is_router else None
        return json_response({"status": "ready", **role, **_count_replicas(server.catalog)}, headers=told)
    reason, retry_s = ("stopping", 1) if server.is_draining else server.catalog.not_ready_reason
    return json_response({"status": reason}, 503, {"Retry-After": str(retry_s)})


def describe_cache(server: Server) -> ServerFacts:
    """Describe the caches and rows of all engines, for a router."""
    names: list[object] = [server.begun_s]
    num_tokens, num_rows, has_store, is_loaded = 0, 0, False, True
    for model in server.catalog:
        engine = model.engine
        facts = None if engine is None else engine.facts
        if engine is None or facts is None:
            is_loaded = False
            continue
        values = {name: value for name, value, _ in facts.settings}
        has_store |= bool(values.get("kv_offloading_path") or values.get("kv_offloading_size"))
        kept = values.get("kv_offloading_path")
        names.append((model.name, kept or [one.pid for one in engine.engines], engine.num_forgotten))
        num_tokens += facts.kv_cache_tokens * len(engine.engines)
        num_rows += (facts.max_num_seqs + MAX_AHEAD) * engine.num_ready
        if kept:
            names[0] = None
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).hexdigest()
    return ServerFacts(digest, None if has_store else num_tokens, num_rows if is_loaded else None)


def _count_replicas(catalog: Catalog) -> dict[str, Any]:
    """Count the first model's engines, where there are several."""
    engine = catalog.default.engine
    if engine is None or len(engine.engines) == 1:
        return {}
    return {"replicas": len(engine.engines), "replicas_ready": engine.num_ready}


async def version(request: Request) -> Response:
    return json_response({"version": VERSION})


async def models(request: Request) -> Response:
    catalog = server_of(request).catalog
    cards = [_make_card(model, name, request) for model in catalog for name in catalog.list_names(model)]
    cards += [_make_lora_card(model, name, request) for model in catalog for name in model.loras.list_names()]
    return json_response({"object": "list", "data": cards})


async def model(request: Request) -> Response:
    if not request.path_params["name"]:  # /v1/models/
        return await models(request)
    catalog, name = server_of(request).catalog, request.path_params["name"]
    found = catalog.find(name)
    if name in found.loras:
        return json_response(_make_lora_card(found, name, request))
    return json_response(_make_card(found, name if name in catalog.list_names(found) else found.name, request))


def find_source(model: ServedModel, request: Request) -> str:
    """Return a model's source; a path only to those who may see paths."""
    return model.model if sees_all(request) or not looks_like_path(model.model) else model.name


def _make_card(model: ServedModel, name: str, request: Request) -> dict[str, Any]:
    card: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "penstock",
        "root": find_source(model, request),
        "parent": None,
        "loaded": model.is_loaded,
    }
    if model.is_loaded:
        card["max_model_len"] = model.facts.max_model_len
        has_template = model.tokenizer is not None and model.tokenizer.chat_template is not None
        card["kind"] = "embedding" if model.facts.is_encoder else "chat" if has_template else "completion"
    return card


def _make_lora_card(model: ServedModel, name: str, request: Request) -> dict[str, Any]:
    """Describe an adapter, which is a model by its name; its folder only to those who may see paths."""
    card, lora = _make_card(model, name, request), model.loras.get(name)
    card |= {"root": name, "parent": model.name, "loaded": lora is not None and model.is_loaded}
    if lora is not None:
        card |= {"created": lora.created, "lora_rank": lora.rank}
        card["root"] = lora.path if sees_all(request) else name
    return card


async def info(request: Request) -> Response:
    """List every setting of every model, with the reason for its value; tenants see only the models."""
    server = server_of(request)
    if not sees_all(request):
        models_shown = [
            {"name": one.name, "loaded": one.is_loaded, **(_list_public_facts(one) if one.is_loaded else {})}
            for one in server.catalog
        ]
        return json_response({"version": VERSION, "models": models_shown})
    shown = []
    for one in server.catalog:
        entry: dict[str, Any] = {"name": one.name, "model": one.model, "loaded": one.is_loaded}
        if one.is_loaded:
            facts = one.facts
            entry |= {
                **_list_public_facts(one),
                "path": None if one.path is None else str(one.path),
                "num_bytes": facts.num_bytes,
                "kv_cache_bytes": facts.kv_cache_bytes,
                "load_s": facts.load_s,
                "pid": one.running.pid,
                "num_restarts": one.running.num_restarts,
                **describe_processes(one.running),
                "stats": one.running.stats,
                "loras": [describe(lora) for lora in one.loras],
                "settings": [{"name": name, "value": value, "why": why} for name, value, why in facts.settings],
                "defaults": [
                    {"name": each.name, "value": each.value, "why": each.why} for each in one.found_defaults.settings
                ],
            }
        shown.append(entry)
    role = server.config.lone_role or BOTH
    return json_response({"version": VERSION, "uptime_s": time.time() - server.begun_s, "role": role, "models": shown})


def _list_public_facts(model: ServedModel) -> dict[str, Any]:
    facts = model.facts
    return {
        "architecture": facts.architecture,
        "quantization": facts.quantization,
        "max_model_len": facts.max_model_len,
    }


async def list_running(request: Request) -> Response:
    """List running and waiting requests, without their content."""
    server = server_of(request)
    rows = []
    for one in server.catalog:
        if one.engine is None:
            continue
        for state, flights in (("running", one.engine.dispatcher.flights.values()), ("waiting", one.admission)):
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
                        **({"replicas": flight.trace.replicas} if flight.trace.replicas else {}),
                    }
                )
    return json_response({"pid": server.pid, "uptime_s": time.time() - server.begun_s, "requests": rows})


async def reset_prefix_cache(request: Request) -> Response:
    for one in server_of(request).catalog:
        one.sessions.forget()
        if one.engine is not None:
            one.engine.forget_prefixes()
    return json_response({"status": "ok"})


async def metrics(request: Request) -> Response:
    return Response(server_of(request).metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def refuse_path(request: Request, error: Exception) -> Response:
    path = request.url.path
    meant = [other for other in (f"/v1{path}", path.removeprefix("/v1")) if other != path and _is_route(request, other)]
    advice = f"did you mean {meant[0][:200]}?" if meant else "see /docs for all routes"
    return ApiError(404, f"no route {request.method} {path[:200]}: {advice}", code="not_found").response(path)


def _is_route(request: Request, path: str) -> bool:
    scope = {**request.scope, "path": path}
    return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)


async def refuse_method(request: Request, error: Exception) -> Response:
    return ApiError(
        405, f"{request.url.path[:200]} does not take {request.method}", code="method_not_allowed"
    ).response(request.url.path)
