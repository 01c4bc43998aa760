"""/api/pull and /api/delete: models that come and go while the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from penstock import hub
from penstock.errors import DownloadFailed, InvalidModel, shown
from penstock.hub.names import existing_path, looks_like_path, parse_name
from penstock.server.catalog import Catalog
from penstock.server.context import event_stream, json_response, read, server_of
from penstock.server.errors import ApiError
from penstock.server.ollama.answer import MEDIA_TYPE, failed, line
from penstock.server.ollama.bodies import OllamaDelete, OllamaPull
from penstock.server.ollama.names import find_model, needed_name

ALIVE_S = 5.0  # between two signs of life


async def pull(request: Request) -> Response:
    """Fetch a model; from then on it is served under its name."""
    body = await read(request, OllamaPull)
    name = needed_name(body.model, body.name)
    if looks_like_path(name) or existing_path(name) is not None:
        raise ApiError(400, f"{shown(name)} is a path: a server fetches models by name only; serve files with --model")
    try:
        parse_name(name)
    except InvalidModel as error:
        raise ApiError(404, str(error), param="model") from None
    lines = _fetch(name, server_of(request).catalog)
    if body.stream is not False:
        return await event_stream(request, lines, failed, MEDIA_TYPE)
    async for _ in lines:
        pass
    return json_response({"status": "success"})


async def _fetch(name: str, catalog: Catalog) -> AsyncGenerator[bytes, None]:
    """A client that leaves does not end the download: the next one finds it done."""
    yield line({"status": "pulling manifest"})
    fetching = asyncio.ensure_future(asyncio.to_thread(hub.pull, name, None, False))
    try:
        while not (await asyncio.wait([fetching], timeout=ALIVE_S))[0]:
            yield line({"status": f"pulling {name}"})
        fetching.result()
    except (InvalidModel, DownloadFailed) as error:
        raise ApiError(404 if isinstance(error, InvalidModel) else 502, str(error)) from None
    catalog.add(name)
    yield line({"status": "verifying sha256 digest"})
    yield line({"status": "success"})


async def delete(request: Request) -> Response:
    """End a model and remove its files."""
    body = await read(request, OllamaDelete)
    name = needed_name(body.model, body.name)
    catalog = server_of(request).catalog
    model = find_model(catalog, name, is_exact=True)
    catalog.check_removable(model)
    if not server_of(request).config.allow_delete:
        raise ApiError(403, "this server removes no files: start it with --allow-delete if it should", code="no_delete")
    try:
        await asyncio.to_thread(hub.remove_model, model.model)
    except InvalidModel as error:
        raise ApiError(404, str(error)) from None
    await catalog.remove(model)
    return Response()
