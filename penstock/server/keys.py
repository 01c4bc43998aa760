"""API keys: whose they are, and where they are read."""

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

from penstock.errors import InvalidConfig
from penstock.regular import UnreadableFile, read_regular
from penstock.server.config import ServerConfig
from penstock.server.context import Client

log = logging.getLogger("penstock.server")

OPEN = frozenset({"/health", "/health/live", "/health/ready", "/version"})
ADMIN = frozenset({"/admin/running", "/admin/reset_prefix_cache", "/api/pull", "/api/delete"})
KEYS_VARIABLE, ADMIN_VARIABLE = "PENSTOCK_API_KEYS", "PENSTOCK_ADMIN_KEY"
MAX_FILE_BYTES = 1 << 20
FORM = "KEY [NAME [WEIGHT]], with a weight over 0"


@dataclass(frozen=True)
class Key:
    secret: str
    name: str
    weight: float = 1.0


def read_keys(given: Sequence[str], path: str | None, variable: str | None = None) -> list[Key]:
    """Keys from flags, from a file and from the text of an environment variable, of lines KEY [NAME [WEIGHT]]."""
    keys = [Key(_checked(secret, "an API key"), _name(secret)) for secret in given]
    if path is not None:
        keys += _parse(_read(path, "api_key_file"), f"api_key_file {path}")
    if variable is not None:
        keys += _parse(variable.replace(",", "\n"), f"${KEYS_VARIABLE}")
    names: dict[str, str] = {}
    for key in keys:
        if names.setdefault(key.secret, key.name) != key.name:
            raise InvalidConfig(f"{names[key.secret]} and {key.name} have the same API key: give each its own")
    return keys


def read_admin_key(given: str | None, path: str | None, variable: str | None = None) -> str | None:
    """The admin key: from its flag, or else its file, or else the text of the environment variable."""
    if given is None and path is not None:
        given = _read(path, "admin_key_file").strip()
    if given is None and variable is not None:
        given = variable.strip()
    return None if given is None else _checked(given, "the admin key")


def _read(path: str, option: str) -> str:
    try:
        return read_regular(path, MAX_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidConfig(f"{option} {path} is no UTF-8 text: save it as UTF-8") from None
    except UnreadableFile as error:
        raise InvalidConfig(f"{option} {path} cannot be read: {error}") from None


def _parse(text: str, source: str) -> list[Key]:
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    keys = [_parse_line(line, source) for line in lines if line and not line.startswith("#")]
    if not keys:
        raise InvalidConfig(
            f"{source} has no key in it, which would let everyone in: write lines {FORM}, or leave it "
            "out to accept everyone"
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
    return Key(_checked(secret, f"a key of {source}"), rest[0] if rest else _name(secret), weight)


def _checked(secret: str, what: str) -> str:
    secret = secret.strip()
    if not secret:
        raise InvalidConfig(f"{what} is empty: give a secret, or leave it out")
    if any(ord(char) < 32 or ord(char) == 127 for char in secret):
        raise InvalidConfig(f"{what} has a control character, which no header can carry: give another")
    return secret


def _name(secret: str) -> str:
    """A tenant's name that does not give its key away."""
    return "key-" + hashlib.sha256(_encode(secret)).hexdigest()[:12]


def _encode(secret: str) -> bytes:
    return secret.encode(errors="surrogateescape")  # bytes of a command line that are no text


class KeyRing:
    def __init__(self, keys: Iterable[Key] = (), admin: str | None = None) -> None:
        self._weights: dict[str, float] = {}
        self.replace(keys, admin)

    def replace(self, keys: Iterable[Key], admin: str | None) -> None:
        """Take other keys from now on; what runs is not touched."""
        self._keys = tuple(keys)
        self._admin = admin
        weights = {key.name: key.weight for key in self._keys}
        for name in self._weights.keys() - weights.keys():
            del self._weights[name]
        self._weights.update(weights)

    @property
    def closed(self) -> bool:
        """Whether clients need a key at all."""
        return bool(self._keys)

    @property
    def has_admin(self) -> bool:
        return self._admin is not None

    def weights(self) -> Mapping[str, float]:
        """By tenant; what `replace` changes shows in it."""
        return self._weights

    def identify(self, secret: str | bytes | None, *, is_local: bool = False) -> Client | None:
        """Whose key it is; None for nobody's. Every key is compared, each in constant time. `is_local` says that
        somebody on this machine asks: where there are no keys, that is the admin."""
        given = _encode(secret) if isinstance(secret, str) else secret or b""
        found = None if self.closed else Client(is_admin=is_local and not self.has_admin)
        for key in self._keys:
            if _matches(given, key.secret):
                found = Client(key.name)
        if self._admin is not None and _matches(given, self._admin):
            return Client(is_admin=True)
        return found


def _matches(given: bytes, secret: str) -> bool:
    """Clients send what is beyond ASCII as UTF-8 or, where they follow the letter of HTTP, as Latin-1."""
    utf8 = latin = _encode(secret)
    with contextlib.suppress(UnicodeEncodeError):
        latin = secret.encode("latin-1")
    return hmac.compare_digest(given, utf8) | hmac.compare_digest(given, latin)


def _read_all(config: ServerConfig) -> tuple[list[Key], str | None]:
    keys = read_keys(config.api_key, config.api_key_file, os.environ.get(KEYS_VARIABLE))
    return keys, read_admin_key(config.admin_key, config.admin_key_file, os.environ.get(ADMIN_VARIABLE))


def make_ring(config: ServerConfig) -> KeyRing:
    """Read all keys, and say how the admin routes are reached."""
    ring = KeyRing(*_read_all(config))
    if ring.closed and not ring.has_admin:
        log.info(
            "there are API keys and no admin key: admin routes, pulls, unloading and /metrics are closed to "
            "everyone; set %s or --admin-key-file to reach them",
            ADMIN_VARIABLE,
        )
    return ring


def reload_keys(ring: KeyRing, config: ServerConfig) -> None:
    """Read all keys again. If they cannot be used, InvalidConfig is raised and the ring stays as it was."""
    keys, admin = _read_all(config)
    if ring.closed and not keys:
        raise InvalidConfig("there is no API key any more, which would let everyone in: restart the server for that")
    ring.replace(keys, admin)
