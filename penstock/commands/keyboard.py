"""Messages typed or pasted at a terminal, or piped in, over one line or several."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

FENCE = '"""'
COMMAND = "/"
HISTORY_LENGTH = 1000
PASTE_S = 0.05  # within which the lines of one paste follow each other
LOCAL_FLAGS, CHARACTERS = 3, 6  # in a list of terminal attributes


def read_message(read_line: Callable[[str], str], has_more: Callable[[], bool] = lambda: False) -> str:
    """One message. A line that ends in a backslash goes on; triple quotes enclose lines as they are; lines that arrive
    together, as a paste's do, belong together.

    `read_line` is given the prompt to show and raises EOFError at the end of input. `has_more` says whether further
    input has arrived already.
    """
    line = read_line(">>> ")
    if line.lstrip().startswith(FENCE):
        return _fenced(line.lstrip()[len(FENCE) :], read_line)
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


def _fenced(line: str, read_line: Callable[[str], str]) -> str:
    lines = []
    while not line.rstrip().endswith(FENCE):
        lines.append(line)
        line = read_line("... ")
    return "\n".join([*lines, line.rstrip()[: -len(FENCE)]]).strip("\n")


class Keyboard:
    """Line editing with a history that outlives the chat, where the system has it."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._ended = False
        if self.is_terminal:
            self._load_history()
            self._take_pastes()

    def read_line(self, prompt: str) -> str:
        """The next line; EOFError at the end of input, and from then on."""
        if self._ended:
            raise EOFError
        try:
            return input(prompt if self.is_terminal else "")
        except EOFError:
            self._ended = True
            raise

    def has_more(self) -> bool:
        """True if a person's terminal has sent more than the line just read; the rest of a paste may be half a line."""
        if not self.is_terminal:
            return False
        try:
            import termios

            number = sys.stdin.fileno()
            before = termios.tcgetattr(number)
        except (ImportError, OSError, ValueError):
            return False
        unbuffered = [*before[:CHARACTERS], [*before[CHARACTERS]]]
        unbuffered[LOCAL_FLAGS] &= ~termios.ICANON  # else only whole lines can be seen
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
        """Have the terminal mark pastes, so that their lines are edited and sent as one. Python switches this off; only
        GNU's readline knows it."""
        with suppress(ImportError):
            import readline

            if "libedit" not in (readline.__doc__ or ""):
                readline.parse_and_bind("set enable-bracketed-paste on")

    @staticmethod
    def _path() -> Path:
        from penstock.hub import home

        return home() / "chat_history"
