"""Names that clients write into their code, whichever model they talk to."""

from __future__ import annotations

MAX_NAME_CHARS = 256            # answers repeat the name that the client used

_NAMES = frozenset({"default", "dummy", "local-model", "tgi"})
_BEGINNINGS = ("chatgpt-", "claude-", "gpt-", "text-davinci-", "text-embedding-")
_OPEN = ("gpt-j", "gpt-neo", "gpt-oss", "gpt-sw3")          # somebody may really want one of these


def stands_in(name: str) -> bool:
    """The name means any model that there is, and none in particular."""
    if len(name) > MAX_NAME_CHARS:
        return False
    return name in _NAMES or name.startswith(_BEGINNINGS) and not name.startswith(_OPEN)
