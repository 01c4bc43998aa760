"""Names this server goes by. A page that points its own name at this machine (DNS rebinding) sends that name as Host:
whatever name is not known here is refused, with keys too. An address cannot be rebound, so where the server listens on
all of them, every address is accepted."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Sequence

from starlette.types import Scope

from penstock.errors import InvalidConfig, shown
from penstock.server.config import ServerConfig
from penstock.server.errors import ApiError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_HOST = re.compile(r"(\[[0-9a-f:.%]+\]|[^\s:\[\]@/?#\\]*)(?::(\d{0,5}))?", re.ASCII | re.IGNORECASE)
_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\*", re.ASCII)
FORWARDING = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"})


def split_host(value: str) -> tuple[str, int | None] | None:
    """The name, in lower case and without brackets and last dot, and the port; None if it is no host."""
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
    """True for a name or an address that can only be this machine."""
    address = parse_address(name)
    return name == "localhost" or address is not None and address.is_loopback


class Hosts:
    def __init__(self, bound: str, allowed: Sequence[str] = ()) -> None:
        """`bound` is what the server listens on: a name or an address."""
        self._allowed = {_checked(one) for one in allowed}
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


def _checked(entry: str) -> str:
    """A name of --allowed-hosts; a port behind it says nothing."""
    found = split_host(entry.strip())
    if found is None or not (_NAME.fullmatch(found[0]) or parse_address(found[0])):
        raise InvalidConfig(
            f"allowed_hosts={shown(entry)} is no host: give a name or an address, *.NAME for all names "
            "under one, or * for all"
        )
    return str(parse_address(found[0]) or found[0])


def hosts_of(scope: Scope) -> list[str]:
    """The hosts that a request names: one, unless somebody plays tricks."""
    named = [value for name, value in scope["headers"] if name == b"host"]
    if scope.get("authority") is not None:
        named.append(scope["authority"])
    return [value.decode("latin-1").strip(" \t") for value in named]


def is_local(scope: Scope) -> bool:
    """True where a process on this machine asks: by a name that only this machine has, and with no proxy between."""
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
    """Refuses requests to a name that this server does not go by."""

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
                    f"this server does not go by the name {shown(one)}: start it with "
                    "--allowed-hosts NAME if it should",
                    code="unknown_host",
                )
        return None


def make_hosts(config: ServerConfig) -> Hosts:
    return Hosts(config.host, config.allowed_hosts)
