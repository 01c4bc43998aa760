"""A call as a JSON object, read while it streams."""

from __future__ import annotations

import re

from penstock.text.answer_events import skip
from penstock.text.tools.stream_parser import StreamParser

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_SCALAR_END = re.compile(r'[\s,:"{}\[\]]')

_HEX = "[0-9a-fA-F]"
_HIGH, _LOW = rf"\\u[dD][89abAB]{_HEX}{{2}}", rf"\\u[dD][c-fC-F]{_HEX}{{2}}"
_UNIT = re.compile(rf"[^\\]+|{_HIGH}{_LOW}|\\u{_HEX}{{4}}|\\.", re.DOTALL)
_INCOMPLETE = re.compile(rf"\\(u{_HEX}{{0,3}})?|{_HIGH}(\\(u{_HEX}{{0,3}})?)?")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class JsonScanner:
    """Reads one value; `done` after its last character. The text must begin with the value.

    Brackets are counted, not matched, and nothing else is checked: that is the reader's job. A number or bare word is
    done only at the character after it.
    """

    def __init__(self) -> None:
        self.done = self._in_string = self._in_scalar = self._escaped = False
        self._depth = 0

    def push(self, text: str, at: int = 0) -> int:
        """Return the position after what belongs to the value."""
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
    """Decodes the inside of a JSON string as it streams; unknown escapes stay."""

    def __init__(self) -> None:
        self._rest = ""

    def push(self, text: str) -> str:
        text, at = self._rest + text, 0
        units = []
        while at < len(text) and not _INCOMPLETE.fullmatch(text, at):
            found = _UNIT.match(text, at)
            unit = found.group() if found else text[at]
            units.append(_decode(unit))
            at += len(unit)
        self._rest = text[at:]
        return "".join(units)


def _decode(unit: str) -> str:
    if unit[0] != "\\":
        return unit
    if unit[1:2] == "u" and len(unit) > 2:
        codes = [int(code, 16) for code in unit[2:].split("\\u")]
        return whole("".join(map(chr, codes)))
    return _ESCAPES.get(unit[1:], unit)


def whole(text: str) -> str:
    """Join surrogate pairs; a lone half becomes U+FFFD."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class Arguments:
    """Passes an object through, unwraps a string that holds one, and turns null or a blank string into {}. The text
    must begin with the value."""

    def __init__(self) -> None:
        self._scanner = JsonScanner()
        self._first = ""
        self._quoted = _Quoted()
        self._scalar: list[str] = []
        self._out: list[str] = []

    @property
    def done(self) -> bool:
        return self._scanner.done

    def push(self, text: str, at: int) -> int:
        """Return the position after what belongs to the value."""
        end = self._scanner.push(text, at)
        piece = text[at:end]
        self._first = self._first or piece[:1]
        if self._first in "{[":
            self._out.append(piece)
        elif self._first == '"':
            self._out.append(self._quoted.push(piece, self.done))
        else:
            self._scalar.append(piece)
            if self.done:
                scalar = "".join(self._scalar)
                self._out.append("{}" if scalar == "null" else scalar)
        return end

    def take(self) -> str:
        """Return the text ready since the last call."""
        out = "".join(self._out)
        self._out.clear()
        return out


class _Quoted:
    """A string value: the object inside it, else itself. Its first non-space character decides."""

    def __init__(self) -> None:
        self._unescape = Unescape()
        self._holds_object: bool | None = None
        self._raw: list[str] = []
        self._inner: list[str] = []

    def push(self, piece: str, done: bool) -> str:
        if self._holds_object is False:
            return piece
        begin = 0 if self._raw else 1
        inner = self._unescape.push(piece[begin : len(piece) - done])
        if self._holds_object:
            return inner
        self._raw.append(piece)
        self._inner.append(inner)
        if not inner or inner.isspace():
            return "{}" if done else ""
        self._holds_object = inner.lstrip()[0] in "{["
        return "".join(self._inner if self._holds_object else self._raw)


ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id")


class CallObject:
    """Reads one object; `ended` after it, or at the first character that cannot belong to a call.

    `begun`: a call was emitted. It begins with its arguments, once its name is known. A `sure` object can only be a
    call: other keys are skipped, and arguments may be missing.
    """

    def __init__(self, stream: StreamParser, sure: bool) -> None:
        self.begun = self.ended = self._has_arguments = False
        self._stream, self._sure = stream, sure
        self._expected, self._key, self._name = "{", "", ""
        self._scanner: JsonScanner | None = None
        self._scanned: list[str] = []
        self._arguments: Arguments | None = None
        self._early: list[str] = []  # arguments before the name

    def push(self, text: str, at: int) -> int:
        while at < len(text) and not self.ended:
            end = self._step(text, at)
            self._stream.hold(text[at:end])
            at = end
        return at

    def _step(self, text: str, at: int) -> int:
        if self._arguments:
            return self._read_arguments(self._arguments, text, at)
        if self._scanner:
            return self._read_value(self._scanner, text, at)
        end = skip(text, at)
        return end if end > at else self._structure(text[at], at)

    def _structure(self, char: str, at: int) -> int:
        expected = self._expected
        if expected == "value":
            self._open_value(char)
            return at
        if expected == "key" and char == '"':
            self._scanner = JsonScanner()
            return at
        if char == "}" and expected in ("key", ","):
            self._close()
        elif char == expected:
            self._expected = {"{": "key", ":": "value", ",": "key"}[expected]
        else:
            self.ended = True
            return at
        return at + 1

    def _open_value(self, char: str) -> None:
        is_arguments = self._key in ARGUMENT_KEYS and not self._has_arguments
        known = self._sure or self._key in (*ARGUMENT_KEYS, *OTHER_KEYS, "name")
        fits = char == '"' if self._key == "name" else self._sure or not is_arguments or char in '"{'
        if char in ",:}]" or not known or not fits:
            self.ended = True
        elif is_arguments:
            self._arguments = Arguments()
        else:
            self._scanner = JsonScanner()

    def _read_value(self, scanner: JsonScanner, text: str, at: int) -> int:
        end = scanner.push(text, at)
        self._scanned.append(text[at:end])
        if scanner.done:
            value = "".join(self._scanned)
            self._scanner = None
            self._scanned.clear()
            self._have(value)
        return end

    def _have(self, value: str) -> None:
        if self._expected == "key":
            self._key, self._expected = Unescape().push(value[1:-1]), ":"
            return
        self._expected = ","
        if self._key == "name" and not self.begun:
            self._name = Unescape().push(value[1:-1])
            self.ended = not self._name
            if self._name and self._has_arguments:
                self._begin("".join(self._early))

    def _read_arguments(self, arguments: Arguments, text: str, at: int) -> int:
        end = arguments.push(text, at)
        piece = arguments.take()
        if not self._name:
            self._early.append(piece)
        elif piece:
            self._begin(piece)
        if arguments.done:
            self._arguments, self._has_arguments, self._expected = None, True, ","
        return end

    def _close(self) -> None:
        self.ended = True
        if self._name and not self.begun and self._sure:
            self._begin("{}")

    def _begin(self, arguments: str) -> None:
        if not self.begun:
            self.begun = True
            self._stream.begin(self._name)
        self._stream.arguments(arguments)
