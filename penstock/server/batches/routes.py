"""/v1/batches."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.batches.body import BatchBody
from penstock.server.batches.room import Batches
from penstock.server.batches.state import BatchState
from penstock.server.context import client_of, json_response, read
from penstock.server.errors import ApiError
from penstock.server.files.listing import page_of

MAX_LISTED, LISTED = 100, 20


async def create_batch(request: Request) -> Response:
    body = await read(request, BatchBody)
    return json_response((await _batches(request).create(client_of(request).tenant, body)).as_json())


async def batches(request: Request) -> Response:
    found = _batches(request).all_of(client_of(request).tenant)
    return json_response(page_of(found, BatchState.as_json, request.query_params, MAX_LISTED, LISTED))


async def batch(request: Request) -> Response:
    return json_response(_batches(request).find(client_of(request).tenant, request.path_params["id"]).as_json())


async def cancel_batch(request: Request) -> Response:
    state = await _batches(request).cancel(client_of(request).tenant, request.path_params["id"])
    return json_response(state.as_json())


def _batches(request: Request) -> Batches:
    found: Batches | None = request.app.state.batches
    if found is None:
        raise ApiError(503, "this server takes no batches")
    return found
