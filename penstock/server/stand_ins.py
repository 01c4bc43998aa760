"""Names that clients write into their code, whichever model they talk to."""

from __future__ import annotations

import re

MAX_NAME_CHARS = 256  # answers repeat the name that the client used

_NAMES = frozenset({"default", "dummy", "local-model", "tgi"})
_BEGINNINGS = ("babbage-", "chatgpt-", "claude-", "davinci-", "gpt-", "text-davinci-", "text-embedding-")
_REASONERS = re.compile(r"o[1-9](?:-.*)?")  # OpenAI's o3, o4-mini
_OPEN = ("gpt-j", "gpt-neo", "gpt-oss", "gpt-sw3")  # somebody may really want one of these


def stands_in(name: str) -> bool:
    """The name means any model that there is, and none in particular."""
    if len(name) > MAX_NAME_CHARS:
        return False
    if name in _NAMES or _REASONERS.fullmatch(name):
        return True
    return name.startswith(_BEGINNINGS) and not name.startswith(_OPEN)
