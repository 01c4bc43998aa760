"""API keys: who may call what. Every route is closed unless it is named here."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import InvalidConfig
from penstock.server.context import Client
from penstock.server.errors import ApiError

OPEN = frozenset({"/health", "/health/live", "/health/ready", "/version"})
ADMIN = frozenset({"/admin/running", "/admin/reset_prefix_cache", "/api/pull", "/api/delete"})


@dataclass(frozen=True)
class Key:
    secret: str
    name: str
    weight: float = 1.0


def read_keys(given: Sequence[str], path: str | None) -> list[Key]:
    """Keys from flags and from a file of lines KEY [NAME [WEIGHT]]."""
    keys = [Key(secret, _name(secret)) for secret in given]
    if path is not None:
        try:
            lines = Path(path).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfig(f"api_key_file {path} cannot be read: {error}") from None
        keys += [_parse(line, path) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if any(not key.secret.strip() for key in keys):
        raise InvalidConfig("an API key is empty: give a secret, or leave --api-key out to accept everyone")
    return keys


def _parse(line: str, path: str) -> Key:
    secret, *rest = line.split()
    try:
        weight = float(rest[1]) if len(rest) > 1 else 1.0
    except ValueError:
        weight = math.nan
    if len(rest) > 2 or not 0 < weight < math.inf:
        raise InvalidConfig(f"api_key_file {path}: a line must be KEY [NAME [WEIGHT]], with a weight over 0")
    return Key(secret, rest[0] if rest else _name(secret), weight)


def _name(secret: str) -> str:
    """A tenant's name that does not give its key away."""
    return "key-" + hashlib.sha256(secret.encode()).hexdigest()[:12]


class KeyRing:
    def __init__(self, keys: Iterable[Key] = (), admin: str | None = None) -> None:
        self._keys = list(keys)
        self._admin = admin

    @property
    def closed(self) -> bool:
        """Whether clients need a key at all."""
        return bool(self._keys)

    def weights(self) -> dict[str, float]:
        return {key.name: key.weight for key in self._keys}

    def identify(self, secret: str | None) -> Client | None:
        """Whose key it is; None for nobody's. Every key is compared, each in constant time."""
        given = (secret or "").encode()
        found = Client() if not self.closed else None
        for key in self._keys:
            if hmac.compare_digest(given, key.secret.encode()):
                found = Client(key.name)
        if self._admin is not None and hmac.compare_digest(given, self._admin.encode()):
            return Client(is_admin=True)
        if found is not None and self._admin is None and not self.closed:
            return Client(is_admin=True)        # a server without keys trusts whoever reaches it
        return found


class Gate:
    """Asks for a key before a route is run; decided by the route that matches, never by the path as written."""

    def __init__(self, app: ASGIApp, ring: KeyRing, routes: Sequence[BaseRoute]) -> None:
        self._app, self._ring, self._routes = app, ring, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        route = self._route(scope)
        if route not in OPEN:
            client = self._ring.identify(_secret(scope))
            denied = self._denied(client, route, scope)
            if denied is not None:
                return await denied.response(scope["path"])(scope, receive, send)
            scope["client_identity"] = client
        await self._app(scope, receive, send)

    def _route(self, scope: Scope) -> str | None:
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                path: str | None = getattr(route, "path", None)
                return path
        return None

    def _denied(self, client: Client | None, route: str | None, scope: Scope) -> ApiError | None:
        if client is None:
            return ApiError(401, "a valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: "
                                 "KEY'", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if route in ADMIN and not client.is_admin:
            return ApiError(403, "this needs the admin key", code="admin_only")
        if route in ADMIN and _from_elsewhere(scope):
            return ApiError(403, "pages of other web sites may not call this", code="admin_only")
        return None


def _from_elsewhere(scope: Scope) -> bool:
    """Whether a browser says that another site's page makes this call."""
    headers = dict(scope["headers"])
    origin = headers.get(b"origin")
    return origin is not None and origin.partition(b"://")[2] != headers.get(b"host")


def _secret(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return str(value[7:].decode("latin-1")).strip()
        if name == b"x-api-key":
            return str(value.decode("latin-1")).strip()
    return None
