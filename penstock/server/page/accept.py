"""Tell browsers from other clients. Needs no other module of the server."""

from __future__ import annotations

from starlette.types import Scope

FILES_ROUTE = "/page/{name:path}"  # static files, which need no key


def wants_page(scope: Scope) -> bool:
    """True for a browser: a read that names text/html among what it accepts."""
    if scope["method"] not in ("GET", "HEAD"):
        return False
    accepted = b",".join(value for name, value in scope["headers"] if name == b"accept").lower()
    return any(_is_html(part) for part in accepted.split(b","))


def _is_html(part: bytes) -> bool:
    kind, *parameters = (word.strip() for word in part.split(b";"))
    quality = next((one[2:].strip() for one in parameters if one.startswith(b"q=")), b"1")
    return kind in (b"text/html", b"application/xhtml+xml") and quality.strip(b"0.") != b""
