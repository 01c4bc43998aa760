"""Random ids, and ids that another process can make again."""

from __future__ import annotations

import hashlib
import secrets
from contextvars import ContextVar

ID_BYTES = 12


class IdSource:
    """Ids in the order they are asked for, the same wherever the secret is the same."""

    def __init__(self, secret: str) -> None:
        self._secret, self._num_made = secret, 0

    def next(self) -> str:
        self._num_made += 1
        return hashlib.blake2b(f"{self._secret}:{self._num_made}".encode(), digest_size=ID_BYTES).hexdigest()


SOURCE: ContextVar[IdSource | None] = ContextVar("penstock_ids", default=None)


def make_id() -> str:
    """Make an id: the next one of the context's source, or a random one."""
    source = SOURCE.get()
    return secrets.token_hex(ID_BYTES) if source is None else source.next()
