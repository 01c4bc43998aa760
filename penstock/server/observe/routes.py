"""Routes that show what the server does: `/admin/live` and `/admin/requests/{id}`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import quote
from penstock.server.http.context import client_of, event_stream, json_response, server_of
from penstock.server.http.errors import ApiError
from penstock.server.http.keys import sees_all
from penstock.server.http.sse import MEDIA_TYPE
from penstock.server.observe.trace import format_trace


async def watch_live(request: Request) -> Response:
    """Stream the live view. HEAD takes no watcher's seat."""
    if request.method == "HEAD":
        return Response(media_type=MEDIA_TYPE)
    return await event_stream(request, server_of(request).live.watch())


async def explain_request(request: Request) -> Response:
    """Show the timeline of a running or recent request. A tenant finds its own alone."""
    id, all_seen = request.path_params["id"], sees_all(request)
    trace = server_of(request).traces.find(id, None if all_seen else client_of(request).tenant)
    if trace is None:
        raise ApiError(
            404,
            f"no recent request {quote(id[:128])}: give the id of a response or its x-request-id; only the last "
            "ones are kept",
            code="not_found",
        )
    return json_response(format_trace(trace, sees_all=all_seen))
