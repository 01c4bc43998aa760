"""The value of a call's arguments as JSON text, piece by piece."""

from __future__ import annotations

from penstock.text.tools.json_scanner import JsonScanner, Unescape


class Arguments:
    """An object comes out as the model wrote it, a string that holds an object unwrapped, null or a blank string as {}.
    The text must begin with the value."""

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
        """The place behind what belongs to the value."""
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
        """What is ready since the last call."""
        out = "".join(self._out)
        self._out.clear()
        return out


class _Quoted:
    """A string value: what it holds if that is an object, else itself. Its first character that is no space tells."""

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
