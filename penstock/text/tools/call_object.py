"""One call as a JSON object: {"name": …, "arguments": …}."""

from __future__ import annotations

from penstock.text.markers import skip
from penstock.text.tools.arguments import Arguments
from penstock.text.tools.json_scanner import JsonScanner, Unescape
from penstock.text.tools.stream import Stream

ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id")


class CallObject:
    """Reads one object and is `ended` behind it, or at the first character that no call can have there.

    `begun` tells whether a call came of it. The call begins with its arguments, once its name is known. A `sure`
    object stands where only a call may stand: other keys are passed over there, and arguments may be missing.
    """

    def __init__(self, stream: Stream, sure: bool) -> None:
        self.begun = False
        self.ended = False
        self._stream, self._sure = stream, sure
        self._expected = "{"
        self._key = ""
        self._name = ""
        self._scanner: JsonScanner | None = None
        self._scanned: list[str] = []
        self._arguments: Arguments | None = None
        self._early: list[str] = []  # arguments that came before the name
        self._has_arguments = False

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
