"""Convert Python literals to JSON without running Python."""

from __future__ import annotations

import json
import re
from typing import Any

from penstock.text.tools.call_object import whole

MAX_DEPTH = 100

_OUTSIDE = re.compile(r"""["'()\[\]{},]""")
_INSIDE = {quote: re.compile(rf"[{quote}\\]") for quote in "'\""}
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*')
  | (?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))
  | (?P<word>\w+)
  | (?P<mark>[][(){},:]))""",
    re.DOTALL | re.VERBOSE | re.ASCII,
)
_ESCAPE = re.compile(
    r"""\\(?:
    (?P<code>x[\da-fA-F]{2}|u[\da-fA-F]{4}|U00[\da-fA-F]{6})
  | (?P<octal>[0-7]{1,3})
  | (?P<char>.))""",
    re.DOTALL | re.VERBOSE | re.ASCII,
)
_CHARS = {
    "\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "/": "/",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class ValueScanner:
    """Reads one argument's value; `done` before the comma or bracket that follows it."""

    def __init__(self) -> None:
        self.done = self._escaped = False
        self._depth, self._quote = 0, ""

    def push(self, text: str, at: int) -> int:
        while at < len(text) and not self.done:
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (_INSIDE[self._quote] if self._quote else _OUTSIDE).search(text, at)
            if not found:
                return len(text)
            at = found.end()
            self._see(found.group())
            if self.done:
                at -= 1
        return at

    def _see(self, char: str) -> None:
        if char == "\\":
            self._escaped = True
        elif char in "'\"":
            self._quote = "" if self._quote else char
        elif self._depth == 0 and char in ",)]}":
            self.done = True
        elif char != ",":
            self._depth += 1 if char in "([{" else -1


def to_json(source: str) -> str:
    """Convert a literal of strings, numbers, True, False, None, lists, tuples and dicts (JSON's words too).
    ValueError for anything else."""
    return json.dumps(_Literal(source).parse(), ensure_ascii=False, allow_nan=False)


class _Literal:
    def __init__(self, source: str) -> None:
        self._source, self._at = source.rstrip(), 0
        self._kind = self._token = ""
        self._advance()

    def parse(self) -> Any:
        value = self._value(0)
        if self._kind != "end":
            raise ValueError(f"{self._token!r} after the value")
        return value

    def _advance(self) -> str:
        """Advance to the next token; return the previous one."""
        before = self._token
        if self._at == len(self._source):
            self._kind, self._token = "end", ""
            return before
        found = _TOKEN.match(self._source, self._at)
        if not found:
            raise ValueError(f"not a literal at character {self._at}")
        self._kind, self._at = str(found.lastgroup), found.end()
        self._token = found.group(self._kind)
        return before

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        kind, token = self._kind, self._advance()
        if kind == "string":
            return self._strings(token)
        if kind == "number":
            return int(token) if re.fullmatch(r"[-+]?\d+", token) else float(token)
        if kind == "word" and token in _WORDS:
            return _WORDS[token]
        if token == "{":
            return self._dict(depth)
        if token in ("[", "("):
            return self._list("]" if token == "[" else ")", depth)
        raise ValueError(f"{token!r} is not a literal")

    def _strings(self, token: str) -> str:
        """Join neighbouring strings, as Python does; triple quotes are read the same way."""
        parts = [_unquote(token)]
        while self._kind == "string":
            parts.append(_unquote(self._advance()))
        return whole("".join(parts))

    def _list(self, closing: str, depth: int) -> Any:
        items, num_commas = [], 0
        while self._token != closing or self._kind != "mark":
            items.append(self._value(depth + 1))
            num_commas += self._comma(closing)
        self._advance()
        return items[0] if closing == ")" and items and not num_commas else items

    def _dict(self, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while self._token != "}" or self._kind != "mark":
            key = self._value(depth + 1)
            if self._kind != "mark" or self._advance() != ":":
                raise ValueError("a dict's key needs a colon")
            items[key if isinstance(key, str) else json.dumps(key)] = self._value(depth + 1)
            self._comma("}")
        self._advance()
        return items

    def _comma(self, closing: str) -> bool:
        if self._kind == "mark" and self._token == ",":
            self._advance()
            return True
        if self._kind != "mark" or self._token != closing:
            raise ValueError(f"{self._token!r} instead of a comma or {closing!r}")
        return False


def _unquote(token: str) -> str:
    return _ESCAPE.sub(_unescape, token[1:-1])


def _unescape(match: re.Match[str]) -> str:
    if match["code"] is not None:
        return chr(int(match["code"][1:], 16))
    return chr(int(match["octal"], 8)) if match["octal"] else _CHARS.get(match["char"], match.group())
