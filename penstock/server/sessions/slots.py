"""llama-server's `/slots`, over sessions: a request's `id_slot` names one, which is saved, restored and erased."""

from __future__ import annotations

import time
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import quote
from penstock.server.common.fields import MAX_SESSION_CHARS, RequestBody, SamplingBody, name_slot
from penstock.server.engines.in_flight import InFlightRequest
from penstock.server.http.context import json_response, read_body, server_of
from penstock.server.http.errors import ApiError
from penstock.server.model import ServedModel
from penstock.server.sessions import keep
from penstock.server.sessions.keep import SessionCall

ACTIONS = ("save", "restore", "erase")
PARAMS = ("n", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop", "seed")


class SlotBody(RequestBody):
    """Name what a slot is saved as."""

    filename: str = Field(min_length=1, max_length=MAX_SESSION_CHARS)
    model: str | None = None


async def show(request: Request) -> Response:
    """List as many slots as sequences can run at once; those of requests that named none are the first free ones."""
    model = await server_of(request).catalog.open(request.query_params.get("model"))
    running = _place(model)
    slots = [_format(model, id, running.get(id)) for id in range(_count(model))]
    if request.query_params.get("fail_on_no_slot") and all(slot["is_processing"] for slot in slots):
        raise ApiError(503, "no slot available", code="unavailable_error", headers={"Retry-After": "1"})
    return json_response(slots)


async def act(request: Request) -> Response:
    """Save, restore or erase the session of a slot, as `action` says."""
    action, id = request.query_params.get("action"), request.path_params["id"]
    if action not in ACTIONS:
        raise ApiError(400, f"action={quote(action)} is unknown: add ?action=save, restore or erase", param="action")
    body = None if action == "erase" else await read_body(request, SlotBody)
    named = request.query_params.get("model") if body is None else body.model
    model = await server_of(request).catalog.open(named)
    if not id.isascii() or not id.isdigit() or len(id) > 9 or int(id) >= _count(model):
        raise ApiError(400, f"there is no slot {quote(id[:20])}: give one of 0 to {_count(model) - 1}", param="id_slot")
    session = name_slot(int(id))
    asked = SamplingBody.model_validate({"model": named, "session": session})
    call = SessionCall(request, model, session, session if body is None else f"slots {body.filename}", asked)
    begun_s = time.monotonic()
    if action == "erase":
        return json_response({"id_slot": int(id), "n_erased": await keep.erase(call)})
    assert body is not None
    if action == "save":
        count, names = await keep.save(call), ("n_saved", "n_written", "save_ms")
    else:
        (count, _), names = await keep.restore(call), ("n_restored", "n_read", "restore_ms")
    facts = model.facts
    return json_response(
        {
            "id_slot": int(id),
            "filename": body.filename,
            names[0]: count,
            names[1]: count * facts.kv_cache_bytes // max(1, facts.kv_cache_tokens),
            "timings": {names[2]: round(1e3 * (time.monotonic() - begun_s), 3)},
        }
    )


def _count(model: ServedModel) -> int:
    return model.facts.max_num_seqs * len(model.running.engines)


def _place(model: ServedModel) -> dict[int, tuple[int, InFlightRequest, int]]:
    """Place what runs: in the slot that its request named, if that is free, else in the first free one."""
    flights = enumerate(model.running.dispatcher.flights.values())
    open_ones = [(task, flight, sibling) for task, flight in flights for sibling in flight.outputs]
    placed: dict[int, tuple[int, InFlightRequest, int]] = {}
    names = {name_slot(id): id for id in range(_count(model))}
    rest = []
    for one in open_ones:
        id = names.get(one[1].request.session)
        if id is None or id in placed:
            rest.append(one)
        else:
            placed[id] = one
    free = [id for id in range(_count(model)) if id not in placed]
    return placed | dict(zip(free, rest))


def _format(model: ServedModel, id: int, running: tuple[int, InFlightRequest, int] | None) -> dict[str, Any]:
    slot: dict[str, Any] = {
        "id": id,
        "id_task": -1,
        "n_ctx": model.facts.max_model_len,
        "speculative": any(name == "speculative_config" and value for name, value, _ in model.facts.settings),
        "is_processing": running is not None,
    }
    if running is None:
        return slot
    task, flight, sibling = running
    request, num_done = flight.request, len(flight.outputs[sibling])
    params = {name: getattr(request.sampling, name) for name in PARAMS}
    left = request.max_tokens - num_done
    return {
        **slot,
        "id_task": task,
        "params": {**params, "n_predict": request.max_tokens, "repeat_penalty": request.sampling.repetition_penalty},
        "next_token": {"has_next_token": left > 0, "n_remain": left, "n_decoded": num_done},
    }
