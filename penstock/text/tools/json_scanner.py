"""Where a JSON value ends, and what an escaped string says, read piece by piece."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_SCALAR_END = re.compile(r'[\s,:"{}\[\]]')

_HEX = "[0-9a-fA-F]"
_HIGH, _LOW = rf"\\u[dD][89abAB]{_HEX}{{2}}", rf"\\u[dD][c-fC-F]{_HEX}{{2}}"
_UNIT = re.compile(rf"[^\\]+|{_HIGH}{_LOW}|\\u{_HEX}{{4}}|\\.", re.DOTALL)
_INCOMPLETE = re.compile(rf"\\(u{_HEX}{{0,3}})?|{_HIGH}(\\(u{_HEX}{{0,3}})?)?")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class JsonScanner:
    """Reads one value and is `done` behind its last character. The text must begin with the value.

    Brackets are counted, not matched, and what stands between them is not judged: a slip of the model is for the
    reader of the value to see. A number or a bare word is done only when the character after it is there.
    """

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._in_scalar = False

    def push(self, text: str, at: int = 0) -> int:
        """The place behind what belongs to the value."""
        while at < len(text) and not self.done:
            if self._escaped:
                self._escaped, at = False, at + 1
            elif self._in_string:
                at = self._string(text, at)
            elif self._in_scalar:
                at = self._scalar(text, at)
            else:
                at = self._structure(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        found = _INSIDE.search(text, at)
        if not found:
            return len(text)
        if found.group() == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = self._depth == 0
        return found.end()

    def _scalar(self, text: str, at: int) -> int:
        found = _SCALAR_END.search(text, at)
        self.done = found is not None
        return found.start() if found else len(text)

    def _structure(self, text: str, at: int) -> int:
        if self._depth == 0 and text[at] not in '"{[':
            self._in_scalar = True
            return at
        found = _OUTSIDE.search(text, at)
        if not found:
            return len(text)
        if found.group() == '"':
            self._in_string = True
        else:
            self._depth += 1 if found.group() in "{[" else -1
            self.done = self._depth == 0
        return found.end()


class Unescape:
    """The inside of a JSON string, decoded as it comes; escapes that JSON does not know stay as they are."""

    def __init__(self) -> None:
        self._rest = ""

    def push(self, text: str) -> str:
        text, at = self._rest + text, 0
        units = []
        while at < len(text) and not _INCOMPLETE.fullmatch(text, at):
            found = _UNIT.match(text, at)
            unit = found.group() if found else text[at]
            units.append(_decoded(unit))
            at += len(unit)
        self._rest = text[at:]
        return "".join(units)


def _decoded(unit: str) -> str:
    if unit[0] != "\\":
        return unit
    if unit[1:2] == "u" and len(unit) > 2:
        codes = [int(code, 16) for code in unit[2:].split("\\u")]
        return whole("".join(map(chr, codes)))
    return _ESCAPES.get(unit[1:], unit)


def whole(text: str) -> str:
    """Surrogate pairs joined; a lone half, which UTF-8 cannot write, is U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
