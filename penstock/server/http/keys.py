"""Read API keys and identify clients by them."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import InvalidConfig
from penstock.host.files import UnreadableFile, read_regular
from penstock.host.ids import SOURCE
from penstock.server.config import ServerConfig
from penstock.server.connections.hosts import is_local
from penstock.server.handover.asked import CURRENT_HANDOVER, HANDOVER
from penstock.server.http.context import IDENTITY, Client
from penstock.server.http.errors import ApiError
from penstock.server.http.relay import CURRENT_RELAY, RELAY, Relay, RouterAccess
from penstock.server.page.accept import FILES_ROUTE, wants_page

log = logging.getLogger("penstock.server")
HEALTH = frozenset({"/health", "/v1/health", "/health_generate", "/health/live", "/health/ready", "/ping"})
OPEN = HEALTH | {"/version", FILES_ROUTE}
ADMIN = frozenset({"/api/pull", "/api/delete", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/flush_cache"})
ADMIN_PREFIX = "/admin/"  # also the admin's, all but those for tenants
FOR_TENANTS = frozenset({"/admin/requests/{id:path}"})  # a tenant finds its own
KEYS_VARIABLE, ADMIN_VARIABLE = "PENSTOCK_API_KEYS", "PENSTOCK_ADMIN_KEY"
MAX_FILE_BYTES = 1 << 20
FORM = "KEY [NAME [WEIGHT]], with a weight over 0"
OTHERS_LOAD = frozenset({"/metrics", "/slots"})  # show the load of all tenants: for the admin only
SEES_ALL = "sees_all"  # scope key
ROUTE = "route_path"  # scope key: the matched route's declared path, or None


class KeyOptions(Protocol):
    """The options that give keys."""

    @property
    def api_key(self) -> tuple[str, ...]: ...
    @property
    def api_key_file(self) -> str | None: ...
    @property
    def admin_key(self) -> str | None: ...
    @property
    def admin_key_file(self) -> str | None: ...


@dataclass(frozen=True)
class Key:
    """An API key with its tenant's name and share."""

    secret: str
    name: str
    weight: float = 1.0


def read_keys(given: Sequence[str], path: str | None, variable: str | None = None) -> list[Key]:
    """Read keys from flags, a file and an environment variable; lines are KEY [NAME [WEIGHT]]."""
    keys = [Key(_check_secret(secret, "an API key"), _make_name(secret)) for secret in given]
    if path is not None:
        keys += _parse(_read(path, "api_key_file"), f"api_key_file {path}")
    if variable is not None:
        keys += _parse(variable.replace(",", "\n"), f"${KEYS_VARIABLE}")
    names: dict[str, str] = {}
    for key in keys:
        if names.setdefault(key.secret, key.name) != key.name:
            raise InvalidConfig(f"{names[key.secret]} and {key.name} have the same API key: give each its own")
    return keys


def read_admin_key(key: str | None, path: str | None, variable: str | None = None) -> str | None:
    """Read the admin key from its flag, else its file, else the environment variable."""
    if key is None and path is not None:
        key = _read(path, "admin_key_file").strip()
    if key is None and variable is not None:
        key = variable.strip()
    return None if key is None else _check_secret(key, "the admin key")


def read_secret(path: str | None, option: str) -> str | None:
    """Read a file that holds one key."""
    return None if path is None else _check_secret(_read(path, option), f"the key of {option} {path}")


def make_router_access(config: ServerConfig) -> RouterAccess:
    """Read the key of a router in front of the server, if it has one."""
    return RouterAccess(read_secret(config.router_key_file, "router_key_file"))


def _read(path: str, option: str) -> str:
    try:
        return read_regular(path, MAX_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidConfig(f"{option} {path} is not UTF-8: save it as UTF-8") from None
    except UnreadableFile as error:
        raise InvalidConfig(f"cannot read {option} {path}: {error}") from None


def _parse(text: str, source: str) -> list[Key]:
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    keys = [_parse_line(line, source) for line in lines if line and not line.startswith("#")]
    if not keys:
        raise InvalidConfig(
            f"{source} has no key, which would let everyone in: write lines {FORM}, or leave it out to accept everyone"
        )
    return keys


def _parse_line(line: str, source: str) -> Key:
    secret, *rest = line.split()
    try:
        weight = float(rest[1]) if len(rest) > 1 else 1.0
    except ValueError:
        weight = math.nan
    if len(rest) > 2 or not 0 < weight < math.inf:
        raise InvalidConfig(f"{source}: a line must be {FORM}")
    return Key(_check_secret(secret, f"a key of {source}"), rest[0] if rest else _make_name(secret), weight)


def _check_secret(secret: str, what: str) -> str:
    secret = secret.strip()
    if not secret:
        raise InvalidConfig(f"{what} is empty: give a secret, or leave it out")
    if any(ord(char) < 32 or ord(char) == 127 for char in secret):
        raise InvalidConfig(f"{what} has a control character, which no header can carry: give another")
    return secret


def _make_name(secret: str) -> str:
    """Name a tenant without revealing its key."""
    return "key-" + hashlib.sha256(_encode(secret)).hexdigest()[:12]


def _encode(secret: str) -> bytes:
    return secret.encode(errors="surrogateescape")  # command line bytes that are not UTF-8


class KeyRing:
    def __init__(self, keys: Iterable[Key] = (), admin: str | None = None) -> None:
        self._weights: dict[str, float] = {}
        self.replace(keys, admin)

    def replace(self, keys: Iterable[Key], admin: str | None) -> None:
        """Replace the keys; running requests are not affected."""
        self._keys = tuple(keys)
        self._admin = admin
        weights = {key.name: key.weight for key in self._keys}
        for name in self._weights.keys() - weights.keys():
            del self._weights[name]
        self._weights.update(weights)

    @property
    def closed(self) -> bool:
        return bool(self._keys)

    @property
    def has_admin(self) -> bool:
        return self._admin is not None

    def weights(self) -> Mapping[str, float]:
        """Return a live mapping of tenants to their shares."""
        return self._weights

    def identify(self, secret: str | bytes | None, *, is_local: bool = False) -> Client | None:
        """Find the client of a key, or None; compares every key in constant time.

        Without keys, a client on this machine (`is_local`) is the admin.
        """
        given = _encode(secret) if isinstance(secret, str) else secret or b""
        found = None if self.closed else Client(is_admin=is_local and not self.has_admin)
        for key in self._keys:
            if _matches(given, key.secret):
                found = Client(key.name)
        if self._admin is not None and _matches(given, self._admin):
            return Client(is_admin=True)
        return found


def _matches(key: bytes, secret: str) -> bool:
    """Compare as UTF-8 and as Latin-1: clients encode non-ASCII keys either way."""
    utf8 = latin = _encode(secret)
    with contextlib.suppress(UnicodeEncodeError):
        latin = secret.encode("latin-1")
    return hmac.compare_digest(key, utf8) | hmac.compare_digest(key, latin)


def _read_all(config: KeyOptions) -> tuple[list[Key], str | None]:
    keys = read_keys(config.api_key, config.api_key_file, os.environ.get(KEYS_VARIABLE))
    return keys, read_admin_key(config.admin_key, config.admin_key_file, os.environ.get(ADMIN_VARIABLE))


def make_ring(config: KeyOptions) -> KeyRing:
    """Read all keys, and log how to reach the admin routes."""
    ring = KeyRing(*_read_all(config))
    if ring.closed and not ring.has_admin:
        log.info(
            "no admin key is set: admin routes, pulls, unloading and /metrics are closed to "
            "everyone; set %s or --admin-key-file to open them",
            ADMIN_VARIABLE,
        )
    return ring


def reload_keys(ring: KeyRing, config: KeyOptions) -> None:
    """Read all keys again; on InvalidConfig the ring is unchanged."""
    keys, admin = _read_all(config)
    if ring.closed and not keys:
        raise InvalidConfig("no API key is left, which would let everyone in: restart the server to open it")
    ring.replace(keys, admin)


class AuthMiddleware:
    """Identify the client by its key and refuse what it may not call."""

    def __init__(
        self, app: ASGIApp, ring: KeyRing, routes: Sequence[BaseRoute], router: RouterAccess | None = None
    ) -> None:
        """`router` knows the key of a router in front of this server."""
        self._app, self._ring, self._routes = app, ring, routes
        self._router = RouterAccess(None) if router is None else router
        self._known: set[str] = set()  # paths that are a route's own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or IDENTITY in scope:  # an internal batch request has its tenant's identity
            return await self._app(scope, receive, send)
        route = scope[ROUTE] = self._find_route(scope)
        if route not in OPEN and not (route == "/" and wants_page(scope)):
            local = is_local(scope)
            try:
                is_routed, client = self._router.read(scope)
            except ApiError as error:
                return await error.response(scope["path"])(scope, receive, send)
            if client is None:
                client = self._ring.identify(_read_key(scope), is_local=local and not is_routed)
            found = self._find_error(client, route)
            if found is not None:
                return await found.response(scope["path"])(scope, receive, send)
            scope[IDENTITY] = client
            sees_own = local and not self._ring.closed and not is_routed
            scope[SEES_ALL] = client is not None and client.is_admin or sees_own
        asked = CURRENT_HANDOVER.set(scope.get(HANDOVER))
        try:
            await self._run(scope, receive, send)
        finally:
            CURRENT_HANDOVER.reset(asked)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app with a router's ids."""
        relay: Relay | None = scope.get(RELAY)
        if relay is None:
            return await self._app(scope, receive, send)
        tokens = SOURCE.set(relay.ids), CURRENT_RELAY.set(relay)
        try:
            await self._app(scope, receive, send)
        finally:
            SOURCE.reset(tokens[0])
            CURRENT_RELAY.reset(tokens[1])

    def _find_route(self, scope: Scope) -> str | None:
        """Return the declared path of the route; the search takes as long as there are routes."""
        path: str = scope["path"]
        if path in self._known:
            return path
        route = find_route(self._routes, scope)
        if route == path:
            self._known.add(path)
        return route

    def _find_error(self, client: Client | None, route: str | None) -> ApiError | None:
        if client is None:
            return ApiError(
                401,
                "a valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if not client.is_admin and (is_for_admin(route) or route in OTHERS_LOAD and self._ring.closed):
            return admin_only()
        return None


def is_for_admin(route: str | None) -> bool:
    return route in ADMIN or route is not None and route.startswith(ADMIN_PREFIX) and route not in FOR_TENANTS


def find_route(routes: Sequence[BaseRoute], scope: Scope) -> str | None:
    """Return the declared path of the route that a request matches."""
    for route in routes:
        if route.matches(scope)[0] is not Match.NONE:
            return cast("str | None", getattr(route, "path", None))
    return None


def admin_only() -> ApiError:
    return ApiError(
        403,
        "this route is for the admin: send the admin key (PENSTOCK_ADMIN_KEY or "
        "--admin-key-file); a server without keys serves it on localhost only",
        code="admin_only",
    )


def sees_all(request: Request) -> bool:
    """True for a client that may see the whole server: paths, processes, everyone's load."""
    return bool(request.scope.get(SEES_ALL))


def _read_key(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return bytes(value[7:]).strip(b" \t")
        if name == b"x-api-key":
            return bytes(value).strip(b" \t")
    return None
