"""Limit open files and connections: in all, and per client address.

Engines, their sockets, files and the log use a reserve of descriptors, so that clients cannot take the last one. A new
descriptor is the lowest free number: one at or above `max_connections()` means that all below are in use.
"""

from __future__ import annotations

import contextlib
import ipaddress
import resource
from typing import Protocol

from penstock.errors import InvalidConfig

MAX_DESCRIPTORS = 65536  # requested at most
MIN_DESCRIPTORS = 128
RESERVED_DESCRIPTORS = 256  # an engine uses about 12, a sandbox process about 6
MIN_RESERVED = 64
PEER_SHARE = 0.75  # of all connections, for one address; a reverse proxy is one address


def raise_limit() -> int:
    """Raise the soft limit of open files as far as allowed; return the new limit."""
    soft, hard = (
        MAX_DESCRIPTORS if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    wanted = min(MAX_DESCRIPTORS, hard)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    limit = _read_limit()
    if limit < MIN_DESCRIPTORS:
        raise InvalidConfig(
            f"the limit of open files is {limit} and the server needs {MIN_DESCRIPTORS}: raise it with "
            f"`ulimit -n {MIN_DESCRIPTORS}`"
        )
    return limit


def max_connections() -> int:
    """Return how many connections may be open at once: the limit minus the reserve."""
    limit = _read_limit()
    return max(1, limit - max(MIN_RESERVED, min(RESERVED_DESCRIPTORS, limit // 4)))


def _read_limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


class SlotHolder(Protocol):
    @property
    def is_waiting(self) -> bool:
        """True if no complete request is unanswered."""

    def drop(self) -> None:
        """Close at once."""


def peer_of(address: str | None) -> str:
    """Return the address that connections are counted by: for IPv6 its /64 network."""
    try:
        found = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)


class ConnectionSlots:
    """A fixed number of slots. A new connection takes the slot of the one that has been idle longest."""

    def __init__(self, max_total: int, max_per_peer: int | None = None) -> None:
        self.max_total = max_total
        self.max_per_peer = max(1, int(max_total * PEER_SHARE)) if max_per_peer is None else max_per_peer
        self._taken: dict[str, dict[SlotHolder, None]] = {}  # by peer, oldest first
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def take(self, holder: SlotHolder, peer: str) -> bool:
        """Give `one` a slot; False if none can be freed."""
        if len(self._taken.get(peer, ())) >= self.max_per_peer and not self._free(peer):
            return False
        if self._total >= self.max_total and not self._free(max(self._taken, key=lambda p: len(self._taken[p]))):
            return False
        self._taken.setdefault(peer, {})[holder] = None
        self._total += 1
        return True

    def leave(self, holder: SlotHolder, peer: str) -> None:
        held = self._taken.get(peer, {})
        if holder in held:
            del held[holder]
            self._total -= 1
            if not held:
                del self._taken[peer]

    def _free(self, peer: str) -> bool:
        oldest = next((holder for holder in self._taken[peer] if holder.is_waiting), None)
        if oldest is not None:
            self.leave(oldest, peer)
            oldest.drop()
        return oldest is not None
