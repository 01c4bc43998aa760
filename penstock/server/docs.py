"""/docs: the routes as a page, with scripts of our own: a browser without a network shows it too."""

from __future__ import annotations

from importlib.resources import files

from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.errors import ApiError

ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}


async def docs(request: Request) -> Response:
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="Penstock",
        swagger_favicon_url="data:,",
        swagger_js_url="/docs/swagger-ui-bundle.js",
        swagger_css_url="/docs/swagger-ui.css",
    )
    page.headers["Content-Security-Policy"] = "frame-ancestors 'none'"  # no other page lays itself over it
    return page


async def asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in ASSETS:
        raise ApiError(404, f"there is no {name[:80]!r} among the page's files", code="not_found")
    content = files("fastapi_offline").joinpath("static").joinpath(name).read_bytes()
    return Response(content, media_type=ASSETS[name], headers={"Cache-Control": "max-age=86400"})
