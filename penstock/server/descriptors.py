"""File descriptors: how many this process may open, and how many of them are kept from connections.

Engines, their sockets, files and the log take theirs from the reserve, so that clients can never use up the last one.
A new descriptor is always the lowest free number: one at or beyond `max_connections()` says that all below are in use.
"""

from __future__ import annotations

import contextlib
import resource

from penstock.errors import InvalidConfig

MAX_DESCRIPTORS = 65536  # more is not asked for, whatever the system would give
MIN_DESCRIPTORS = 128
RESERVED_DESCRIPTORS = 256  # an engine takes about 12, a request to a process of its own about 6
MIN_RESERVED = 64


def raise_limit() -> int:
    """Raise the soft limit of open files as far as the system allows; the limit that now holds."""
    soft, hard = (
        MAX_DESCRIPTORS if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    wanted = min(MAX_DESCRIPTORS, hard)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    limit = _limit()
    if limit < MIN_DESCRIPTORS:
        raise InvalidConfig(
            f"the limit of open files is {limit}, the server needs {MIN_DESCRIPTORS}: raise it with "
            f"`ulimit -n {MIN_DESCRIPTORS}` or more"
        )
    return limit


def max_connections() -> int:
    """Connections that may be open at once: what the limit leaves beside the reserve."""
    limit = _limit()
    return max(1, limit - max(MIN_RESERVED, min(RESERVED_DESCRIPTORS, limit // 4)))


def _limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
