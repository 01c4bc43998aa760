"""Pages of other sites: what a browser says of where a request comes from. Browsers set Origin and Sec-Fetch-Site
themselves, so a page cannot lie with them; other clients send neither."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from starlette.types import Scope

from penstock.errors import InvalidConfig, shown
from penstock.server.errors import ApiError
from penstock.server.hosts import hosts_of, is_loopback, split_host

PORTS = {"http": 80, "https": 443}
READS = frozenset({"GET", "HEAD", "OPTIONS"})
OWN_SITES = frozenset({b"same-origin", b"none"})
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@]+", re.ASCII)
_JSON = re.compile(rb"application/(?:[\w.+-]+\+)?json", re.ASCII)


def read_origins(given: Iterable[str]) -> tuple[str, ...]:
    """The values of --allowed-origins as browsers write them."""
    found = tuple(_plain(one.strip().removesuffix("/")) for one in given)
    for one, entry in zip(found, given):
        if not _ORIGIN.fullmatch(one):
            raise InvalidConfig(f"allowed_origins={shown(entry)} is no origin: give SCHEME://HOST[:PORT], or * for all")
    return found


class OriginCheck:
    """Refuses what a page of another site asks for, unless its origin is allowed; and from a page, what is no JSON."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(allowed)

    def __call__(self, scope: Scope) -> ApiError | None:
        origins, sites = _values(scope, b"origin"), _values(scope, b"sec-fetch-site")
        if not origins and not sites:
            return None  # no browser
        if not self._allows(scope, origins, sites):
            told = origins[0].decode("latin-1") if origins else "another site"
            return ApiError(
                403,
                f"pages of {shown(told)} may not call this server: start it with --allowed-origins "
                "ORIGIN if they should",
                code="origin_not_allowed",
            )
        if scope["method"] not in READS and not _is_json(scope):
            return ApiError(415, "a page must send its body as Content-Type: application/json", code="not_json")
        return None

    def _allows(self, scope: Scope, origins: Sequence[bytes], sites: Sequence[bytes]) -> bool:
        if "*" in self._allowed:
            return True
        named = {_plain(origin.decode("latin-1")) for origin in origins}
        if named and named <= self._allowed:
            return True
        if not all(site.lower() in OWN_SITES for site in sites):
            return _is_visit(scope) and not named
        return all(_is_own(origin, scope) for origin in named)


def _plain(origin: str) -> str:
    """As browsers write it: in lower case, without its scheme's own port."""
    origin = origin.lower()
    port = PORTS.get(origin.partition("://")[0])
    return origin if port is None else origin.removesuffix(f":{port}")


def _values(scope: Scope, wanted: bytes) -> list[bytes]:
    return [value.strip() for name, value in scope["headers"] if name == wanted]


def _is_own(origin: str, scope: Scope) -> bool:
    """True for a page that came from this very server: by its scheme and the host that the request names."""
    kind, _, host = origin.partition("://")
    named, hosts = split_host(host), [split_host(one) for one in hosts_of(scope)]
    if kind not in PORTS or named is None or not hosts:
        return False
    if kind != scope.get("scheme", "http") and not (kind == "https" and _has_proxy(scope, *named)):
        return False
    return all(
        one is not None and one[0] == named[0] and (one[1] or PORTS[kind]) == (named[1] or PORTS[kind]) for one in hosts
    )


def _has_proxy(scope: Scope, host: str, port: int | None) -> bool:
    """True where TLS ends before this server: the proxy says so, or the page's port is none that answers here.

    A page of another site could send that header only after a preflight, and that is refused.
    """
    if _values(scope, b"x-forwarded-proto") == [b"https"]:
        return True
    own = scope.get("server")
    return not is_loopback(host) and own is not None and own[1] != (port or PORTS["https"])


def _is_visit(scope: Scope) -> bool:
    """True where somebody follows a link to here: the other page sees nothing of the answer."""
    return (
        scope["method"] in ("GET", "HEAD")
        and _values(scope, b"sec-fetch-mode") == [b"navigate"]
        and _values(scope, b"sec-fetch-dest") == [b"document"]
    )


def _is_json(scope: Scope) -> bool:
    """True where the body is called JSON, or there is none."""
    kinds = [value.partition(b";")[0].strip().lower() for value in _values(scope, b"content-type")]
    lengths = _values(scope, b"content-length")
    is_empty = not _values(scope, b"transfer-encoding") and all(length == b"0" for length in lengths)
    return all(_JSON.fullmatch(kind) for kind in kinds) and (bool(kinds) or is_empty)
