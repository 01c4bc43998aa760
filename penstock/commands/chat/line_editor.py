"""Edit messages at a terminal: several lines, pastes, history and completion."""

from __future__ import annotations

import sys
import termios
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from penstock.commands.chat.history import HistoryFile, history_path
from penstock.commands.chat.keyboard import COMMAND, FENCE, MORE, PROMPT, join_lines

if TYPE_CHECKING:
    from penstock.commands.chat.slash import SlashWords

LOCAL_FLAGS = 3  # index in a list of terminal attributes


class LineEditor:
    """A keyboard at a terminal. `words` completes commands."""

    is_terminal = True

    def __init__(self, words: SlashWords) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_ChatHistory(HistoryFile(history_path())),
            completer=_SlashCompleter(words),
            complete_while_typing=Condition(_is_command),
            auto_suggest=AutoSuggestFromHistory(),
            key_bindings=_bindings(),
            multiline=True,
            prompt_continuation=_begin_line,
            enable_open_in_editor=True,
            reserve_space_for_menu=4,
        )

    def read_message(self) -> str:
        return join_lines(self._session.prompt(PROMPT))


@contextmanager
def quiet_terminal() -> Iterator[None]:
    """Do not show what is typed while an answer is written; the editor gets it afterwards."""
    try:
        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (termios.error, OSError, ValueError):
        yield
        return
    silent = [*before]
    silent[LOCAL_FLAGS] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(number, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSANOW, before)


class _ChatHistory(History):
    """Keeps the history in a file."""

    def __init__(self, file: HistoryFile) -> None:
        super().__init__()
        self._file = file

    def load_history_strings(self) -> Iterable[str]:
        """Return the entries, newest first."""
        return reversed(self._file.load())

    def store_string(self, string: str) -> None:
        self._file.append(string)


class _SlashCompleter(Completer):
    def __init__(self, words: SlashWords) -> None:
        self._words = words

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        if not _is_command(document.text):
            return
        typed = document.text_before_cursor
        for word, note in self._words.complete(typed):
            last = typed if " " not in typed else typed.partition(" ")[2]
            yield Completion(word, start_position=-len(last), display_meta=note)


def _begin_line(width: int, line_number: int, wrap_count: int) -> str:
    """Return what a further line begins with; nothing is typed at the end of a line that is merely long."""
    return " " * len(MORE) if wrap_count else MORE


def _is_command(text: str | None = None) -> bool:
    text = get_app().current_buffer.text if text is None else text
    return text.startswith(COMMAND) and "\n" not in text


def _bindings() -> KeyBindings:
    """Enter sends, unless the message goes on; Alt-Enter and Ctrl-O begin a new line."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.apply_completion(buffer.complete_state.current_completion)
            return
        if _goes_on(buffer.document, _has_more(event)):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("c-o")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return bindings


def _has_more(event: KeyPressEvent) -> bool:
    """True if more keys arrived with this one, as in a paste that the terminal does not mark."""
    return any(key.data not in ("", "\n", "\r") for key in event.key_processor.input_queue)


def _goes_on(document: Document, has_more: bool) -> bool:
    text = document.text
    if text.lstrip().startswith(FENCE):
        inner = text.lstrip()[len(FENCE) :]
        return not inner.rstrip().endswith(FENCE)
    if text.endswith("\\") and document.is_cursor_at_the_end:
        return True
    return has_more and not _is_command(text)
