"""Control tokens that users write stay text: only those that a chat template writes are read as such.

Before rendering, a mark (a character that no text has) goes before every control token that a message spells, and
before a half of one. After rendering, a control token without a mark was written by the template. It is replaced by a
secret name under which the tokenizer knows it too, and the control tokens' own names are then encoded as plain text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

SECRET_NAME = "\ufdef[0-9a-f]{32}\ufdef"
MARKS = [chr(code) for code in range(0xFDD0, 0xFDEF)]       # noncharacters: never in a text that is exchanged


class ControlTokens:
    """Of one tokenizer; not for several threads."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._tokens = {token.content: (id, token) for id, token in added.items() if token.special and token.content}
        self._whole = re.compile(_either(self._tokens)) if self._tokens else None
        parts = {part for text in self._tokens for part in _halves(text)}
        self._any = re.compile(_either(parts)) if parts else None
        self._ids: dict[int, int] = {}              # of the secret names: the ids that they stand for
        self._names: dict[str, str] = {}

    def written_in(self, value: Any) -> bool:
        """A string somewhere in `value` spells a control token, or part of one."""
        return self._any is not None and any(self._any.search(text) for text in strings(value))

    def marker(self, value: Any) -> Marker:
        assert self._whole is not None and self._any is not None
        if not self._names:
            self._name_all()
        texts = list(strings(value))
        mark = next(mark for mark in MARKS if not any(mark in text for text in texts))
        return Marker(mark, self._whole, self._any, self._names)

    def _name_all(self) -> None:
        for text, (id, token) in self._tokens.items():
            name = f"\ufdef{secrets.token_hex(16)}\ufdef"
            self._backend.add_tokens([AddedToken(name, single_word=False, lstrip=token.lstrip, rstrip=token.rstrip,
                                                 normalized=False, special=False)])
            secret = self._backend.token_to_id(name)
            assert secret is not None
            self._names[text], self._ids[secret] = name, id

    @contextmanager
    def only_hidden(self) -> Iterator[None]:
        """Within, control tokens are known by their secret names alone."""
        self._backend.encode_special_tokens = True
        try:
            yield
        finally:
            self._backend.encode_special_tokens = False

    def shown_ids(self, ids: list[int]) -> list[int]:
        return [self._ids.get(id, id) for id in ids]


class Marker:
    """For one conversation."""

    def __init__(self, mark: str, whole: re.Pattern[str], any: re.Pattern[str], names: dict[str, str]) -> None:
        self._any, self._mark, self._names = any, mark, names
        # a template may write its values as JSON in ASCII
        self._marks = re.compile(f"{mark}|\\\\u{ord(mark):04x}", re.IGNORECASE)
        self._found = re.compile(f"({self._marks.pattern})?({whole.pattern})")

    def mark(self, value: Any) -> Any:
        """Every string in `value` with marks."""
        if isinstance(value, str):
            return self._any.sub(lambda found: self._mark + found[0], value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(one) for key, one in value.items()}
        return [self.mark(one) for one in value] if isinstance(value, (list, tuple)) else value

    def read(self, text: str) -> tuple[str, str]:
        """A rendered text with secret names for what the template wrote, and as a person would read it."""
        hidden = self._found.sub(lambda found: found[2] if found[1] else self._names[found[2]], text)
        return self._marks.sub("", hidden), self._marks.sub("", text)


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from strings(key)
            yield from strings(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from strings(one)


def _halves(text: str) -> tuple[str, str]:
    """A beginning and an end of a control token, one of which is in any two strings that join into it."""
    return text[:len(text) // 2 + 1], text[len(text) // 2:]


def _either(texts: Iterable[str]) -> str:
    """A pattern for any of `texts`, the longest first; common beginnings are looked at once."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _pattern(tree)


def _pattern(node: dict[str, Any]) -> str:
    run = ""
    while len(node) == 1 and "" not in node:
        [(char, node)] = node.items()
        run += re.escape(char)
    options = [re.escape(char) + _pattern(after) for char, after in node.items() if char]
    if not options:
        return run
    return f"{run}(?:{'|'.join(options)})" + ("?" if "" in node else "")
