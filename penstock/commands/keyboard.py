"""Messages typed at a terminal or piped in, over one line or several."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

FENCE = '"""'
HISTORY_LENGTH = 1000


def read_message(read_line: Callable[[str], str]) -> str:
    """One message. A line that ends in a backslash goes on; triple quotes enclose lines as they are.

    `read_line` is given the prompt to show and raises EOFError at the end of input.
    """
    line = read_line(">>> ")
    if line.lstrip().startswith(FENCE):
        return _fenced(line.lstrip()[len(FENCE):], read_line)
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = read_line("... ")
    return "\n".join([*lines, line]).strip()


def _fenced(line: str, read_line: Callable[[str], str]) -> str:
    lines = []
    while not line.rstrip().endswith(FENCE):
        lines.append(line)
        line = read_line("... ")
    return "\n".join([*lines, line.rstrip()[:-len(FENCE)]]).strip("\n")


class Keyboard:
    """Line editing with a history that outlives the chat, where the system has it."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if self.is_terminal:
            self._load_history()

    def read_line(self, prompt: str) -> str:
        return input(prompt if self.is_terminal else "")

    def save_history(self) -> None:
        if not self.is_terminal:
            return
        with suppress(ImportError, OSError):
            import readline

            self._path().parent.mkdir(parents=True, exist_ok=True)
            readline.set_history_length(HISTORY_LENGTH)
            readline.write_history_file(self._path())

    def _load_history(self) -> None:
        with suppress(ImportError, OSError):
            import readline

            readline.read_history_file(self._path())

    @staticmethod
    def _path() -> Path:
        from penstock.hub import home

        return home() / "chat_history"
