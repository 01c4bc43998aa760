"""Check which host names and which pages' origins may call."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence

from starlette.types import Scope

from penstock.errors import InvalidConfig, quote
from penstock.server.http.errors import ApiError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_HOST = re.compile(r"(\[[0-9a-f:.%]+\]|[^\s:\[\]@/?#\\]*)(?::(\d{0,5}))?", re.ASCII | re.IGNORECASE)
_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\*", re.ASCII)
FORWARDING = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"})
PORTS = {"http": 80, "https": 443}
READS = frozenset({"GET", "HEAD", "OPTIONS"})
OWN_SITES = frozenset({b"same-origin", b"none"})
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@]+", re.ASCII)
_JSON = re.compile(rb"application/(?:[\w.+-]+\+)?json", re.ASCII)


def split_host(value: str) -> tuple[str, int | None] | None:
    """Split a Host header into lower-case name and port; None if it is invalid."""
    found = _HOST.fullmatch(value)
    if found is None or not found[1]:
        return None
    port = int(found[2]) if found[2] else None
    if port is not None and port > 65535:
        return None
    return found[1].strip("[]").lower().removesuffix("."), port


def parse_address(name: str | None) -> Address | None:
    try:
        found = ipaddress.ip_address((name or "").partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def is_loopback(name: str | None) -> bool:
    """True for a name or address that can only be this machine."""
    address = parse_address(name)
    return name == "localhost" or address is not None and address.is_loopback


class Hosts:
    def __init__(self, bound: str, allowed: Sequence[str] = ()) -> None:
        """Collect the names that are allowed; `bound` is the name or address that the server listens on."""
        self._allowed = {_parse_entry(one) for one in allowed}
        address = parse_address(bound or "0.0.0.0")
        self._names = {str(address or bound.lower().removesuffix("."))}
        self._all_addresses = address is not None and address.is_unspecified
        if self._all_addresses:
            own = socket.gethostname().lower()
            self._names |= {own, own.partition(".")[0]}
        elif address is None:
            with contextlib.suppress(OSError):
                self._names.add(str(socket.getaddrinfo(bound, None, type=socket.SOCK_STREAM)[0][4][0]))

    def allows(self, name: str) -> bool:
        if is_loopback(name) or name in self._names or "*" in self._allowed or name in self._allowed:
            return True
        address = parse_address(name)
        if address is not None:
            return self._all_addresses or str(address) in self._names | self._allowed
        return any(one.startswith("*.") and name.endswith(one[1:]) for one in self._allowed)


def _parse_entry(entry: str) -> str:
    """Parse an entry of --allowed-hosts; a port is ignored."""
    found = split_host(entry.strip())
    if found is None or not (_NAME.fullmatch(found[0]) or parse_address(found[0])):
        raise InvalidConfig(
            f"allowed_hosts={quote(entry)} is not a host: give a name or an address, *.NAME for all names "
            "under one, or * for all"
        )
    return str(parse_address(found[0]) or found[0])


def hosts_of(scope: Scope) -> list[str]:
    """Return the hosts that a request names: the Host headers and the target's authority."""
    named = [value for name, value in scope["headers"] if name == b"host"]
    if scope.get("authority") is not None:
        named.append(scope["authority"])
    return [value.decode("latin-1").strip(" \t") for value in named]


def is_local(scope: Scope) -> bool:
    """True for a request from this machine: a loopback peer and name, and no proxy in between."""
    hosts = [split_host(host) for host in hosts_of(scope)]
    client = scope.get("client")
    return (
        client is not None
        and is_loopback(client[0])
        and bool(hosts)
        and all(host is not None and is_loopback(host[0]) for host in hosts)
        and not any(name in FORWARDING for name, _ in scope["headers"])
    )


class HostCheck:
    """Refuse requests to an unknown host name."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts

    def __call__(self, scope: Scope) -> ApiError | None:
        named = hosts_of(scope)
        num_headers = len(named) - (scope.get("authority") is not None)
        if num_headers > 1 or not num_headers and scope.get("http_version", "1.1") == "1.1":
            return ApiError(400, f"the request has {num_headers} Host headers: send one", code="invalid_host")
        for one in named:
            host = split_host(one)
            if host is None or not self._hosts.allows(host[0]):
                return ApiError(
                    403,
                    f"host {quote(one)} is not allowed: start the server with --allowed-hosts NAME to allow it",
                    code="unknown_host",
                )
        return None


def read_origins(origins: Iterable[str]) -> tuple[str, ...]:
    """Normalize the values of --allowed-origins as browsers write them."""
    found = tuple(_normalize(one.strip().removesuffix("/")) for one in origins)
    for one, entry in zip(found, origins):
        if not _ORIGIN.fullmatch(one):
            raise InvalidConfig(f"allowed_origins={quote(entry)} is invalid: give SCHEME://HOST[:PORT], or * for all")
    return found


class OriginCheck:
    """Refuse requests from pages of other sites unless their origin is allowed, and bodies from pages that are not
    JSON."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(allowed)

    def __call__(self, scope: Scope) -> ApiError | None:
        origins, sites = _find_headers(scope, b"origin"), _find_headers(scope, b"sec-fetch-site")
        if not origins and not sites:
            return None  # not a browser
        if not self._allows(scope, origins, sites):
            told = origins[0].decode("latin-1") if origins else "another site"
            return ApiError(
                403,
                f"pages of {quote(told)} may not call this server: start it with --allowed-origins "
                "ORIGIN to allow them",
                code="origin_not_allowed",
            )
        if scope["method"] not in READS and not _is_json(scope):
            return ApiError(415, "a page must send its body as Content-Type: application/json", code="not_json")
        return None

    def _allows(self, scope: Scope, origins: Sequence[bytes], sites: Sequence[bytes]) -> bool:
        if "*" in self._allowed:
            return True
        named = {_normalize(origin.decode("latin-1")) for origin in origins}
        if named and named <= self._allowed:
            return True
        if not all(site.lower() in OWN_SITES for site in sites):
            return _is_navigation(scope) and not named
        return all(_is_same_origin(origin, scope) for origin in named)


def _normalize(origin: str) -> str:
    """Return the origin in lower case, without its scheme's default port."""
    origin = origin.lower()
    port = PORTS.get(origin.partition("://")[0])
    return origin if port is None else origin.removesuffix(f":{port}")


def _find_headers(scope: Scope, wanted: bytes) -> list[bytes]:
    return [value.strip() for name, value in scope["headers"] if name == wanted]


def _is_same_origin(origin: str, scope: Scope) -> bool:
    """True if scheme and host of `origin` are this server's, as the request names it."""
    kind, _, host = origin.partition("://")
    named, hosts = split_host(host), [split_host(one) for one in hosts_of(scope)]
    if kind not in PORTS or named is None or not hosts:
        return False
    if kind != scope.get("scheme", "http") and not (kind == "https" and _is_behind_tls_proxy(scope, *named)):
        return False
    return all(
        one is not None and one[0] == named[0] and (one[1] or PORTS[kind]) == (named[1] or PORTS[kind]) for one in hosts
    )


def _is_behind_tls_proxy(scope: Scope, host: str, port: int | None) -> bool:
    """True if a proxy terminates TLS: X-Forwarded-Proto says so, or the page's port is not ours.

    Another site's page could send that header only after a preflight, which is refused.
    """
    if _find_headers(scope, b"x-forwarded-proto") == [b"https"]:
        return True
    own = scope.get("server")
    return not is_loopback(host) and own is not None and own[1] != (port or PORTS["https"])


def _is_navigation(scope: Scope) -> bool:
    """True if the user follows a link: the other page cannot read the response."""
    return (
        scope["method"] in ("GET", "HEAD")
        and _find_headers(scope, b"sec-fetch-mode") == [b"navigate"]
        and _find_headers(scope, b"sec-fetch-dest") == [b"document"]
    )


def _is_json(scope: Scope) -> bool:
    """True if the body is declared as JSON or absent."""
    kinds = [value.partition(b";")[0].strip().lower() for value in _find_headers(scope, b"content-type")]
    lengths = _find_headers(scope, b"content-length")
    is_empty = not _find_headers(scope, b"transfer-encoding") and all(length == b"0" for length in lengths)
    return all(_JSON.fullmatch(kind) for kind in kinds) and (bool(kinds) or is_empty)
