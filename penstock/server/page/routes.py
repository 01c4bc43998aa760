"""Serve the page: `/` to browsers, and its files under `/page/`."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import quote
from penstock.server.http.context import Handler
from penstock.server.http.errors import ApiError
from penstock.server.ollama import models
from penstock.server.page.accept import FILES_ROUTE, wants_page

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, but asked for again: a new version shows at once
}


async def root(request: Request) -> Response:
    """Send the page to browsers; Ollama's clients get the answer to their probe."""
    response = _send_file(request, INDEX) if wants_page(request.scope) else await models.alive(request)
    response.headers["Vary"] = "Accept"
    return response


async def send_file(request: Request) -> Response:
    return _send_file(request, request.path_params["name"])


def _send_file(request: Request, name: str) -> Response:
    path = list_files().get(name)
    if path is None:
        raise ApiError(404, f"the page has no file {quote(name[:80])}", code="not_found")
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
    headers = {**HEADERS, "ETag": tag}
    if _has_tag(request, tag):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=TYPES[path.suffix], headers=headers)


@cache
def list_files() -> dict[str, Path]:
    """List all files by their names in URLs: no other path is ever opened."""
    found = (path for path in STATIC.rglob("*") if path.suffix in TYPES and path.is_file())
    return {path.relative_to(STATIC).as_posix(): path for path in found}


def _has_tag(request: Request, tag: str) -> bool:
    known = request.headers.get("if-none-match", "")
    return any(one.strip().removeprefix("W/") in (tag, "*") for one in known.split(","))


PAGES: list[tuple[str, Handler]] = [(FILES_ROUTE, send_file)]
