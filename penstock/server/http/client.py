"""Who sends a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """The sender of a request. `tenant` is its key's name, empty without keys. A batch yields to waiting clients."""

    tenant: str = ""
    is_admin: bool = False
    is_batch: bool = False
