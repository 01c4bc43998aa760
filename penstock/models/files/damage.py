"""How damage in a file is told: one line, whatever the file says."""

from __future__ import annotations

from penstock.errors import InvalidModel


class Damaged(InvalidModel):
    """Bytes that no writer of the format would have left."""


def shown(name: str) -> str:
    """A name from the file, fit for one line of an error."""
    return repr(name if len(name) <= 80 else name[:79] + "…")
