"""Read messages typed, pasted or piped in, over one line or several."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

FENCE = '"""'
COMMAND = "/"
HISTORY_LENGTH = 1000
PASTE_S = 0.05  # the lines of one paste arrive within this time
LOCAL_FLAGS, CHARACTERS = 3, 6  # indices in a list of terminal attributes


def read_message(read_line: Callable[[str], str], has_more: Callable[[], bool] = lambda: False) -> str:
    """Read one message. A trailing backslash continues a line; triple quotes enclose lines verbatim; lines that arrive
    together, as in a paste, belong together.

    `read_line` shows the prompt it is given and raises EOFError at the end. `has_more`: more input has arrived already.
    """
    line = read_line(">>> ")
    if line.lstrip().startswith(FENCE):
        return _read_fenced(line.lstrip()[len(FENCE) :], read_line)
    lines: list[str] = []
    while line.endswith("\\") or (lines or not line.startswith(COMMAND)) and has_more():
        lines.append(line.removesuffix("\\"))
        try:
            line = read_line("... ")
        except EOFError:
            line = ""
            break
    text = "\n".join([*lines, line]).rstrip()
    return text.strip("\n") if "\n" in text.strip() else text.strip()


def _read_fenced(line: str, read_line: Callable[[str], str]) -> str:
    lines = []
    while not line.rstrip().endswith(FENCE):
        lines.append(line)
        line = read_line("... ")
    return "\n".join([*lines, line.rstrip()[: -len(FENCE)]]).strip("\n")


class Keyboard:
    """Line editing with a persistent history, if the system has readline."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._ended = False
        if self.is_terminal:
            self._load_history()
            self._take_pastes()

    def read_line(self, prompt: str) -> str:
        """Return the next line; raise EOFError at the end of input, and from then on."""
        if self._ended:
            raise EOFError
        try:
            return input(prompt if self.is_terminal else "")
        except EOFError:
            self._ended = True
            raise

    def has_more(self) -> bool:
        """True if the terminal has sent more than the line just read; the rest of a paste may be half a line."""
        if not self.is_terminal:
            return False
        try:
            import termios

            number = sys.stdin.fileno()
            before = termios.tcgetattr(number)
        except (ImportError, OSError, ValueError):
            return False
        unbuffered = [*before[:CHARACTERS], [*before[CHARACTERS]]]
        unbuffered[LOCAL_FLAGS] &= ~termios.ICANON  # canonical mode shows whole lines only
        unbuffered[CHARACTERS][termios.VMIN] = 1
        termios.tcsetattr(number, termios.TCSANOW, unbuffered)
        try:
            return bool(select.select([number], [], [], PASTE_S)[0])
        finally:
            termios.tcsetattr(number, termios.TCSANOW, before)

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
    def _take_pastes() -> None:
        """Enable bracketed paste, so that pasted lines are edited and sent as one. Python switches it off; only GNU
        readline has it."""
        with suppress(ImportError):
            import readline

            if "libedit" not in (readline.__doc__ or ""):
                readline.parse_and_bind("set enable-bracketed-paste on")

    @staticmethod
    def _path() -> Path:
        from penstock.hub import home

        return home() / "chat_history"
