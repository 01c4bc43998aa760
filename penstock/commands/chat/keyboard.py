"""Read messages line by line: from a pipe, or at a terminal that cannot move its cursor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

FENCE = '"""'
COMMAND = "/"
PROMPT, MORE = ">>> ", "... "


class Keyboard(Protocol):
    """Where messages come from."""

    is_terminal: bool

    def read_message(self) -> str:
        """Return the next message; raise EOFError at the end of input, and from then on."""


def read_message(read_line: Callable[[str], str]) -> str:
    """Read one message. A trailing backslash continues a line; triple quotes enclose lines verbatim. `read_line` shows
    the prompt it is given and raises EOFError at the end."""
    line = read_line(PROMPT)
    if line.lstrip().startswith(FENCE):
        return _read_fenced(line.lstrip()[len(FENCE) :], read_line)
    lines: list[str] = []
    while line.endswith("\\"):
        lines.append(line.removesuffix("\\"))
        try:
            line = read_line(MORE)
        except EOFError:
            line = ""
            break
    return trim("\n".join([*lines, line]))


def _read_fenced(line: str, read_line: Callable[[str], str]) -> str:
    lines = []
    while not line.rstrip().endswith(FENCE):
        lines.append(line)
        line = read_line(MORE)
    return "\n".join([*lines, line.rstrip()[: -len(FENCE)]]).strip("\n")


def join_lines(text: str) -> str:
    """Make a message of text typed with the signs of `read_message`."""
    lines = text.split("\n")
    rest = iter(lines)

    def read_line(prompt: str) -> str:
        for line in rest:
            return line
        raise EOFError

    try:
        message = read_message(read_line)
    except EOFError:  # the fence is not closed
        return trim(text)
    return message if next(rest, None) is None else trim(text)


def trim(text: str) -> str:
    """Strip a message of one line; keep the indentation of several."""
    text = text.rstrip()
    return text.strip("\n") if "\n" in text.strip() else text.strip()


class LineKeyboard:
    """Reads with `input`, and prompts at a terminal only."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._ended = False

    def read_message(self) -> str:
        return read_message(self._read_line)

    def _read_line(self, prompt: str) -> str:
        if self._ended:
            raise EOFError
        try:
            return input(prompt if self.is_terminal else "")
        except EOFError:
            self._ended = True
            raise
        except KeyboardInterrupt:
            print(flush=True)
            raise
