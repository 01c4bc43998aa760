"""Who may hold a connection: so many in all, and so many of one address."""

from __future__ import annotations

import ipaddress
from typing import Protocol

PEER_SHARE = 0.75  # of all connections, for one address: a reverse proxy is one too


class Seated(Protocol):
    """A connection, as its seat sees it."""

    @property
    def is_waiting(self) -> bool:
        """The server owes it nothing: no request of it is complete."""

    def drop(self) -> None:
        """Close it at once."""


def peer_of(address: str | None) -> str:
    """The address that connections are counted by: a host has all of its IPv6 network's."""
    try:
        found = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)


class Seats:
    """When there are no more, whoever has waited longest without a request loses its seat to the one that comes."""

    def __init__(self, max_total: int, max_per_peer: int | None = None) -> None:
        self.max_total = max_total
        self.max_per_peer = max(1, int(max_total * PEER_SHARE)) if max_per_peer is None else max_per_peer
        self._taken: dict[str, dict[Seated, None]] = {}  # by peer, oldest first
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def take(self, one: Seated, peer: str) -> bool:
        """Give the connection a seat; False if there is none to be had."""
        if len(self._taken.get(peer, ())) >= self.max_per_peer and not self._free(peer):
            return False
        if self._total >= self.max_total and not self._free(max(self._taken, key=lambda p: len(self._taken[p]))):
            return False
        self._taken.setdefault(peer, {})[one] = None
        self._total += 1
        return True

    def leave(self, one: Seated, peer: str) -> None:
        held = self._taken.get(peer, {})
        if one in held:
            del held[one]
            self._total -= 1
            if not held:
                del self._taken[peer]

    def _free(self, peer: str) -> bool:
        oldest = next((one for one in self._taken[peer] if one.is_waiting), None)
        if oldest is not None:
            self.leave(oldest, peer)
            oldest.drop()
        return oldest is not None
